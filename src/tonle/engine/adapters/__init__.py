"""LoRA adapters of a running engine: their names, their content in the host's memory, and the front's view of both.

Does: read files on a thread of its own, keep what was read, drop what was unused for longest. Does not: compute with adapters
(`models`), or choose which are on the device (`engine/schedule/adapter_slots.py`).

    LoadedAdapters   the engine's end: what each name stands for
    HostAdapters     contents in memory, by the engine's numbers
    FrontAdapters    the front's end, in the caller's process; never loads torch
"""
