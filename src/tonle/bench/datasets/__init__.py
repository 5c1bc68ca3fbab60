"""What is sent when prompts are not plain random ones: named workloads, files of several formats, a Khmer set, an audit trail.

Does: read, and say what is wrong with a file, by line. Does not: send.

    presets.py      named workloads (`chat`, `long`, …): lengths, shared prefixes, turns
    read_data.py    a file whose format is found by looking at it
    jsonl.py, sharegpt.py, batch_file.py        the formats
    items.py, data_workload.py                  what the formats have in common, and the jobs made of it
    shipped.py, khmer.jsonl                     the set that comes with Tonle
    audit_trail.py, replay_workload.py          recorded requests at their recorded times
"""
