"""What a `tonle gateway` in the cluster needs to watch the pods of a service: a Role, bound to the gateway's service account.

Does: the rights that discovery uses (docs/scale.md), and no more. Does not: make the service account, or run the gateway.
"""

from __future__ import annotations

from tonle.deploy.document import Document
from tonle.deploy.pod import metadata
from tonle.deploy.workload import Workload
from tonle.errors import ConfigError

_API = "rbac.authorization.k8s.io"


def discovery_rights(workload: Workload) -> list[Document]:
    if workload.deploy.discovered_by is None:
        return []
    namespace, _, account = workload.deploy.discovered_by.rpartition("/")
    namespace = namespace or workload.deploy.namespace or ""
    if not namespace:
        raise ConfigError(
            f"discovered_by: say in which namespace the service account {account} is: NAMESPACE/{account}; or set namespace, if "
            "it is the same",
            param="discovered_by",
        )
    name = f"{workload.name}-discovery"
    return [
        {
            "apiVersion": f"{_API}/v1",
            "kind": "Role",
            "metadata": metadata(workload, name),
            "rules": [
                {
                    "apiGroups": ["discovery.k8s.io"],
                    "resources": ["endpointslices"],
                    "verbs": ["get", "list", "watch"],
                },
                {"apiGroups": [""], "resources": ["pods"], "verbs": ["get"]},  # their labels say prefill or decode
            ],
        },
        {
            "apiVersion": f"{_API}/v1",
            "kind": "RoleBinding",
            "metadata": metadata(workload, name),
            "subjects": [{"kind": "ServiceAccount", "name": account, "namespace": namespace}],
            "roleRef": {"apiGroup": _API, "kind": "Role", "name": name},
        },
    ]
