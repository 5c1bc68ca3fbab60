"""Pools of processes for models that are not token loops: encoders, speech, images.

kind.py       what a worker process runs; a kind of your own is a small class
kinds/        those that come with Tonle
encoders/     the forward pass of BERT and the like, their files and tokenizers
endpoints/    HTTP bodies into jobs, results into replies
"""
