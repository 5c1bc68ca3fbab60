"""More than one replica: on a Ray cluster, and replaced without a failed request (`scaleout/rollout`).

Does: start, scale, replace and stop replicas, which are `tonle serve` processes; tell gateways where they are. Does not: serve,
route or see a request: gateways send those straight to the replicas. Runs in: `tonle ray`, its actors, `tonle rollout`.
"""
