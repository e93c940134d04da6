"""Check a manifest with the schemas that Kubernetes, JobSet and Kubeflow publish; run in an environment that has their packages.

`kubernetes-validate` brings Kubernetes' own schemas, in their strict form: a key that they do not have is an error. Kubeflow
publishes its kinds, and JobSet's inside of them, as pydantic models generated from their OpenAPI specification; these ignore
what they do not know, so a document is held against what a model made of it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml
from kubeflow_trainer_api import models

VERSION = "1.35.0"


def check(text: str) -> list[str]:
    """What was checked."""
    claim, settings, runtime, train_job = yaml.safe_load_all(text)
    inside = runtime["spec"]["template"]["spec"]
    (node,) = inside["replicatedJobs"]
    # The pods as Kubernetes will see them once JobSet and the trainer have made jobs of them.
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": "node"},
        "spec": node["template"]["spec"],
    }
    for core in (claim, settings, job):
        kubernetes_validate.validate(core, VERSION, strict=True)
    job_set = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": "run"},
        "spec": inside,
    }
    for model, document in (
        (models.TrainerV1alpha1TrainJob, train_job),
        (models.TrainerV1alpha1TrainingRuntime, runtime),
        (models.JobsetV1alpha2JobSet, job_set),
    ):
        same(model.from_dict(document).to_dict(), document, document["kind"])
    return [part["kind"] for part in (claim, settings, job, train_job, runtime, job_set)]


def same(read: Any, given: Any, place: str) -> None:
    """Every key of the document is one of the model's, with its value."""
    if isinstance(given, dict):
        for key, value in given.items():
            if key not in read:
                raise SystemExit(f"{place}.{key} is no key of the published schema")
            same(read[key], value, f"{place}.{key}")
    elif isinstance(given, list):
        for number, (one, other) in enumerate(zip(read, given, strict=True)):
            same(one, other, f"{place}[{number}]")
    elif read != given and str(read) != str(given):
        raise SystemExit(f"{place} is {given!r}, read as {read!r}")


if __name__ == "__main__":
    sys.stdout.write(" ".join(check(Path(sys.argv[1]).read_text())) + "\n")
