"""One model on several devices (`tensor_parallel_size`): a process for each, a rank.

Rank 0 is the engine's own process, with the loop, the scheduler and the sampler. The other ranks are its children: each has its
part of the weights and of the KV cache, and computes the steps that rank 0 sends.

Does: start the ranks, hand out steps and adapters, notice that a rank is gone (`ranks.py`, `leading_decoder.py`); be one
(`rank_process.py`). Does not: know how a model is divided (`models/parallel/`), plan or sample.
"""
