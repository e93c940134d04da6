"""The Kubernetes manifest of a run: a Kubeflow TrainJob and its dependencies.

It has four documents: a claim for shared storage, the recipe as a ConfigMap, a TrainingRuntime (volumes, restarts, grace period
of a node), and the TrainJob itself. Kubeflow's torch policy gives every pod torchrun's settings in its
environment (PET_NNODES, PET_NODE_RANK, PET_MASTER_ADDR …), so the command is plain torchrun. When a pod fails, the JobSet
starts all of them again, and `--resume` continues from the last checkpoint. Sources: kubeflow/trainer,
pkg/apis/trainer/v1alpha1 (TrainJob, TrainingRuntime); kubernetes-sigs/jobset, v1alpha2 (JobSetSpec).
"""

from __future__ import annotations

from typing import Any

from rush.clusters.job import Job
from rush.errors import MachineError
from rush.recipe_io import write_toml

API = "trainer.kubeflow.org/v1alpha1"
STEP_LABEL = "trainer.kubeflow.org/trainjob-ancestor-step"
SHARED, SETTINGS = "/shared", "/etc/rush"
Table = dict[str, Any]


def manifest(job: Job) -> str:
    """The documents as YAML, for `kubectl apply -f`."""
    try:
        import yaml
    except ImportError:
        raise MachineError(
            "a manifest is written with PyYAML, which is not installed; pip install pyyaml."
        ) from None
    head = f"# Written by `rush launch`: {job.recipe.world} ranks on {job.nodes} nodes. Submit it with kubectl apply -f.\n"
    parts = [yaml.safe_dump(part, sort_keys=False, width=120, allow_unicode=True) for part in documents(job)]
    return head + "---\n".join(parts)


def documents(job: Job) -> list[Table]:
    return [_claim(job), _settings(job), _runtime(job), _train_job(job)]


def _metadata(job: Job) -> Table:
    return {"name": job.label, **({"namespace": job.namespace} if job.namespace else {})}


def _claim(job: Job) -> Table:
    spec: Table = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": job.storage}}}
    if job.storage_class:
        spec["storageClassName"] = job.storage_class
    return {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": _metadata(job), "spec": spec}


def _settings(job: Job) -> Table:
    data = {"recipe.toml": write_toml(job.recipe)}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": _metadata(job), "data": data}


def _runtime(job: Job) -> Table:
    mounts = [
        {"name": "shared", "mountPath": SHARED},
        {"name": "settings", "mountPath": SETTINGS, "readOnly": True},
        {"name": "memory", "mountPath": "/dev/shm"},
    ]
    pod: Table = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": job.grace_s,
        "containers": [{"name": "node", "image": job.image, "volumeMounts": mounts}],
        "volumes": [
            {"name": "shared", "persistentVolumeClaim": {"claimName": job.label}},
            {"name": "settings", "configMap": {"name": job.label}},
            # NCCL's ranks of one node communicate through shared memory; a container's default is 64 MiB.
            {"name": "memory", "emptyDir": {"medium": "Memory"}},
        ],
    }
    node = {
        "name": "node",
        "template": {
            "metadata": {"labels": {STEP_LABEL: "trainer"}},
            # A pod that fails fails its job at once: the JobSet starts all of them again, together.
            "spec": {"backoffLimit": 0, "template": {"spec": pod}},
        },
    }
    return {
        "apiVersion": API,
        "kind": "TrainingRuntime",
        "metadata": _metadata(job),
        "spec": {
            # Only the TrainJob sets the number of ranks per node: versions of the policy differ in their key for it.
            "mlPolicy": {"numNodes": job.nodes, "torch": {}},
            "template": {
                "spec": {"failurePolicy": {"maxRestarts": job.max_restarts}, "replicatedJobs": [node]}
            },
        },
    }


def _train_job(job: Job) -> Table:
    wanted: Table = {"nvidia.com/gpu": job.gpus_per_node}
    if job.cpus_per_node:
        wanted["cpu"] = job.cpus_per_node
    if job.memory_per_node:
        wanted["memory"] = job.memory_per_node
    environment = {"RUSH_CACHE": f"{SHARED}/cache", **job.environment}
    return {
        "apiVersion": API,
        "kind": "TrainJob",
        "metadata": _metadata(job),
        "spec": {
            "runtimeRef": {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": job.label},
            "trainer": {
                "image": job.image,
                "command": ["torchrun", "-m", "rush", "train"],
                "args": [f"{SETTINGS}/recipe.toml", "--out", job.run_folder, "--resume"],
                "numNodes": job.nodes,
                "numProcPerNode": job.gpus_per_node,
                "resourcesPerNode": {"requests": dict(wanted), "limits": dict(wanted)},
                "env": [{"name": name, "value": value} for name, value in environment.items()],
            },
        },
    }
