"""Faults under load: real processes, a real small model, and what becomes of every request and its record.

    make chaos                                     every fault, and a table of what happened
    make chaos ARGS="--fault kill-engine"          one of them
    python -m tests.chaos --short                  the short form that `make test` runs

`client` and `load` ask, `programs` and `stack` are what is asked, `trail` reads what is on record, `faults_…` do the
damage, `trial` puts one fault under load and judges it, `rows` is the table. `docs/reliability.md` has the results.
"""
