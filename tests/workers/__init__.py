"""Pools of real worker processes, with small kinds."""
