"""The producer: validates requests, puts them on the queue and reads their answers. It loads no torch.

Read `contract.py` first: what a job is.
"""
