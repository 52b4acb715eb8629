"""Ingest by several processes and machines, with Ray."""

from samkv_integrations.cluster.ingest import ClusterIngest, WorkerPool, add_on_ray, cache_on_ray
from samkv_integrations.llm.engine_args import ModelSource, engine_of

__all__ = ["ClusterIngest", "ModelSource", "WorkerPool", "add_on_ray", "cache_on_ray", "engine_of"]
