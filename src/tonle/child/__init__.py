"""Child processes: how they are started, spoken to, watched and stopped.

Each child runs a module of ours (`python -m …`) and has a control socket to its parent. The first message on it holds the
child's settings; what follows is between the two. When the control socket closes, the other side is gone or wants an end.

Does: framing (`frames.py`), start and exit (`spawn.py`), restarts (`supervisor.py`). Does not: know any message's meaning.
Used by: the engine's process, the front ends, the audit writer.
"""
