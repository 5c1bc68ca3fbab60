"""Random input against everything that reads what others send: bodies, headers, streams, model files.

`make test` runs a short form, the same cases every time. The long form: `make fuzz ARGS="--cases 20000 --seed 7"`.
"""
