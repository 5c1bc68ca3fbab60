"""Child processes: start, messages, supervision, stop.

Each child runs a module of ours (`python -m …`) and has a control socket to its parent. The first message on it holds the
child's settings; later messages are up to the two sides. When the control socket closes, the other side has
exited or wants this one to stop.

Does: framing (`frames.py`), start and exit (`spawn.py`), restarts (`supervisor.py`), deaths noticed beside other work
(`hang_up.py`). Does not: interpret messages. Used by: the engine's process and its ranks, the front ends, the audit writer.
"""
