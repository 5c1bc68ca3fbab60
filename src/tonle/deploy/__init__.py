"""From one settings file to the documents of a platform: KServe, llm-d, KEDA, Kubernetes, Docker Compose, RunPod, systemd.

Does: work out what a pod needs and how it is started, write the documents. Does not: talk to a cluster, fetch models or
import torch. What the documents say a container runs is `tonle serve` (or vLLM) with the settings of the file.

    serve, deploy = load_deploy({}, file=Path("tonle.yaml"))
    for file in render("kserve", Workload.of(serve, deploy)):
        print(file.name, file.text)
"""
