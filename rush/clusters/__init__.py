"""Runs on clusters: the batch script for Slurm and the manifest for Kubernetes that start `rush train` on many nodes."""

from __future__ import annotations

from rush.clusters.job import Job, check_nodes
from rush.clusters.kubernetes import documents, manifest
from rush.clusters.slurm import script

__all__ = ["Job", "check_nodes", "documents", "manifest", "script"]
