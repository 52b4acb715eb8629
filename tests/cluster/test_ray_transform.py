"""The transform in the ingestion pipeline of LlamaIndex that runs on Ray."""

from __future__ import annotations

from pathlib import Path

import pytest
from llama_index.core.schema import TextNode

from llama_index.llms.samkv import SamKVCacheTransform
from samkv_integrations.llm.engine_args import ModelSource, engine_of
from tests.support.documents import texts_of_many_lengths

pytestmark = pytest.mark.usefixtures("cluster")

TEXTS = texts_of_many_lengths(12)


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
