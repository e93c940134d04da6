"""Runs on clusters: job files that start `rush train` on many nodes, for Slurm, Kubernetes and SkyPilot."""

from __future__ import annotations

from rush.clusters.job import Job, check_nodes
from rush.clusters.kubernetes import documents, manifest
from rush.clusters.skypilot import Sky, task, task_file
from rush.clusters.slurm import script

__all__ = ["Job", "Sky", "check_nodes", "documents", "manifest", "script", "task", "task_file"]
