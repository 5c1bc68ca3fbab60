"""`tonle rollout`: replace the replicas behind gateways one by one, with a canary first if wanted.

Does: ask gateways to drain, probe, share, add and remove; run the operator's command; judge. Does not: see requests.
"""
