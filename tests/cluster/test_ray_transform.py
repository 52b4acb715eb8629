"""The transform of LlamaIndex in an actor of Ray, made of plain arguments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from llama_index.core.schema import TextNode

from llama_index.llms.samkv import SamKVCacheTransform
from samkv_integrations.llm.engine_args import ModelSource, engine_of
from tests.support.documents import texts_of_many_lengths

pytestmark = pytest.mark.usefixtures("cluster")

TEXTS = texts_of_many_lengths(12)


class Actor:
    """Makes and calls a transform as `RayTransformComponent` does."""

    def __init__(self, kind: type[SamKVCacheTransform], arguments: dict[str, Any]) -> None:
        self.transform = kind(**arguments)

    def run(self, nodes: list[TextNode]) -> list[Any]:
        return [*self.transform(nodes, show_progress=False)]


@pytest.mark.slow  # begins a cluster, whose workers take their time to import torch
def test_an_actor_makes_a_transform_of_plain_arguments(tmp_path: Path, tiny: str) -> None:
    arguments = {"model_name": tiny, "kv_dir": str(tmp_path / "kv"), "namespace": "town"}
    nodes = [TextNode(text=text) for text in TEXTS]
    import ray

    actor = ray.remote(num_cpus=1)(Actor).remote(SamKVCacheTransform, arguments)
    assert ray.get(actor.run.remote(nodes)) == nodes
    engine = engine_of(ModelSource(**arguments))
    assert all(map(engine.is_cached, TEXTS))


@pytest.mark.slow  # begins a cluster, whose workers take their time to import torch
def test_the_pipeline_of_llama_index_on_ray(tmp_path: Path, tiny: str) -> None:
    hosted = pytest.importorskip(
        "llama_index.ingestion.ray", reason="llama-index-ingestion-ray is not installed"
    )
    arguments = {"model_name": tiny, "kv_dir": str(tmp_path / "kv"), "store_bits": 8}
    step = hosted.RayTransformComponent(
        transform_class=SamKVCacheTransform,
        transform_kwargs=arguments,
        map_batches_kwargs={"batch_size": 6, "num_cpus": 1},
    )
    pipeline = hosted.RayIngestionPipeline(transformations=[step])
    nodes = pipeline.run(nodes=[TextNode(text=text) for text in TEXTS])
    assert sorted(node.text for node in nodes) == sorted(TEXTS)
    engine = engine_of(ModelSource(**arguments))
    assert all(map(engine.is_cached, TEXTS))
