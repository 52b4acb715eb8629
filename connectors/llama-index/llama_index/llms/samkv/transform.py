"""The step of an ingestion pipeline that caches chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llama_index.core.bridge.pydantic import Field, PrivateAttr
from llama_index.core.schema import BaseNode, ImageNode, MetadataMode, TransformComponent
from pydantic import computed_field

from samkv_integrations.frameworks.components import twin
from samkv_integrations.frameworks.engine_args import WithEngine
from samkv_integrations.store.chunk import normalise


class SamKVCacheTransform(WithEngine, TransformComponent):
    """Caches the text of every node. Place it after the splitter, before the embedding model.

    Nodes stay as they are, because the text identifies a cache. Images and nodes without text have
    no cache. A second call computes nothing.

    Args:
        llm, engine: the component that caches, one of the two.
        show_progress: whether to show a progress bar, on standard error. LlamaIndex's own
            ``show_progress`` of a pipeline or an index counts steps, and has no effect here.

    Pickles omit the engine, so pipelines must run with ``num_workers=None``.

    Raises InvalidOption unless exactly one of llm and engine is given.

    Instantiate:
        ```python
        from llama_index.core.ingestion import IngestionPipeline
        from llama_index.core.node_parser import SentenceSplitter
        from llama_index.llms.samkv import SamKVCacheTransform, SamKVLLM

        llm = SamKVLLM(model_name="builtin")
        steps = [SentenceSplitter(), SamKVCacheTransform(llm=llm)]
        pipeline = IngestionPipeline(transformations=steps)
        ```

    Use:
        ```python
        from llama_index.core import Document

        text = "[Tobias Trulman] Tobias Trulman was born in Flevport."
        nodes = pipeline.run(documents=[Document(text=text)])
        print(llm.engine.is_cached(text))
        ```

    Async:
        ```python
        nodes = await pipeline.arun(documents=[Document(text=text)])
        ```
    """

    show_progress: bool = Field(default=False, description="Whether to show a progress bar.")

    _store_id: str = PrivateAttr()

    def _use(self) -> None:
        super()._use()
        # a key depends on the store's secret and the model's fingerprint
        self._store_id = self._engine.engine.key_of("store_id")

    @computed_field  # type: ignore[prop-decorator]
    @property
    def store_id(self) -> str:
        """Identifies the model and the store.

        It is part of `to_dict`, so that a pipeline's cache repeats this step for another store.
        """
        return self._store_id

    @classmethod
    def from_dict(cls, data: dict[str, Any], **kwargs: Any) -> SamKVCacheTransform:
        """The transform that `to_dict` described, with an ``llm`` or ``engine`` again."""
        options = {name: value for name, value in data.items() if name != "store_id"}
        transform: SamKVCacheTransform = super().from_dict(options, **kwargs)
        return transform

    @classmethod
    def class_name(cls) -> str:
        """Name in serialised pipelines."""
        return "SamKVCacheTransform"

    def __call__(self, nodes: Sequence[BaseNode], **kwargs: Any) -> Sequence[BaseNode]:
        """Cache the nodes' texts; returns the nodes.

        kwargs: LlamaIndex passes them to every transform; ignored.

        Raises:
            InvalidChunk: a text is longer than the context window; split it first.
            StoreError: the store cannot be written.
        """
        texts = map(body_of, nodes)
        self._engine.engine.cache_chunks(
            [text for text in texts if text], progress=self.show_progress
        )
        return nodes

    acall = twin(__call__)


def body_of(node: BaseNode) -> str:
    """The body of a node; empty if there is nothing to cache."""
    return "" if isinstance(node, ImageNode) else normalise(node.get_content(MetadataMode.NONE))
