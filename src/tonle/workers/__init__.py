"""Pools of processes for models that are not token loops: encoders, speech, images.

kind.py            what a worker process runs; a kind of your own is a small class
kinds/             those that come with Tonle
encoders/          the forward pass of BERT and the like, their files and tokenizers
endpoints/         HTTP bodies into jobs, results into replies
transport.py       pools as a backend of the gateway's pipeline
pool.py            WorkerPool: which jobs run where, and once more
job_queue.py       jobs that wait, and batches of them
instance.py        one place for a worker in a pool, and its workers one after the other
worker_process.py  one of these, from the pool's side
worker.py          the same, inside of it
"""
