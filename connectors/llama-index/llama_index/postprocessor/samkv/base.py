"""The postprocessor: announces retrieved nodes to the engine, and may show them as handles."""

from __future__ import annotations

from copy import deepcopy
from typing import Literal

from llama_index.core.base.llms.types import BaseContentBlock, TextBlock
from llama_index.core.bridge.pydantic import Field, PrivateAttr
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.schema import (
    BaseNode,
    Document,
    MetadataMode,
    NodeWithScore,
    QueryBundle,
    TextNode,
)

from llama_index.llms.samkv.transform import body_of
from samkv_integrations.chroma import KEY_FIELD
from samkv_integrations.frameworks.components import twin
from samkv_integrations.frameworks.engine_args import EngineRef, WithEngine
from samkv_integrations.option import OnMiss
from samkv_integrations.store.chunk import normalise

Mode = Literal["text", "handle"]


class SamKVPostprocessor(WithEngine, BaseNodePostprocessor):
    """Announces retrieved nodes to the engine, and decides how prompts hold them. Place it last.

    The engine reads the caches while the prompt is built, and counts a node without a cache as a
    miss in the report.

    By default prompts hold the nodes' texts, which `SamKVLLM` finds. With ``mode="handle"`` they
    hold a handle for each node, which also works for nodes of less than 24 characters, and for
    templates or windows that cut texts. A handle takes the place of the text in prompts only
    (``MetadataMode.LLM``), after the metadata header. Sources, evaluators and ``node.hash`` have
    the original text. Everything that stores prompts has handles (traces, an agent's memory,
    ``context_only``), and another LLM sees them as noise.

    Args:
        llm, engine: whose caches to use, one of the two.
        mode: ``text`` or ``handle``.
        on_miss: for a node without a cache: ``text`` (leave it as text), ``compute`` (cache it
            now) or ``error`` (raise ChunkNotCached).

    Instantiate:
        ```python
        from llama_index.llms.samkv import SamKVLLM
        from llama_index.postprocessor.samkv import SamKVPostprocessor

        llm = SamKVLLM(model_name="builtin")
        postprocessor = SamKVPostprocessor(llm=llm, on_miss="compute")
        ```

    Use:
        ```python
        from llama_index.core.schema import NodeWithScore, TextNode

        # a query engine does it: index.as_query_engine(llm, node_postprocessors=[postprocessor])
        node = TextNode(text="[Tobias Trulman] Tobias Trulman was born in Flevport.")
        (found,) = postprocessor.postprocess_nodes([NodeWithScore(node=node)])
        print(found.get_content())
        ```

    Async:
        ```python
        found = await postprocessor.apostprocess_nodes([NodeWithScore(node=node)])
        ```
    """

    mode: Mode = Field(default="text", description="How prompts hold the nodes.")
    on_miss: OnMiss = Field(default="text", description="What to do for a text without a cache.")

    @classmethod
    def class_name(cls) -> str:
        """Name in serialised query engines."""
        return "SamKVPostprocessor"

    def _postprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        engine = self._engine.engine
        bodies = {node.node_id: body for node in nodes if (body := body_of(node.node))}
        names = [f"node {node_id!r}" for node_id in bodies]
        engine.announce(list(bodies.values()), self.on_miss, names=names, remedy=_REMEDY)
        return [node.model_copy(update={"node": self._shown(node.node)}) for node in nodes]

    _apostprocess_nodes = twin(_postprocess_nodes)

    def _shown(self, node: BaseNode) -> BaseNode:
        """The node as prompts show it: a copy if it differs, as stores may return their own."""
        kind = _SHOWN_AS_HANDLE.get(type(node)) if self.mode == "handle" else None
        if kind is None and KEY_FIELD not in node.metadata:
            return node
        copy = (kind or type(node)).model_construct(
            node.model_fields_set, **deepcopy(node.__dict__)
        )
        copy.metadata.pop(KEY_FIELD, None)  # of a record that LlamaIndex did not write
        if isinstance(copy, _ShownAsHandle):
            copy._engine, copy._on_miss = self._engine, self.on_miss
        return copy


_REMEDY = "ingest it again with SamKVCacheTransform"


class _ShownAsHandle(BaseNode):
    """A node that prompts show as a handle. It is serialised as the original node."""

    _engine: EngineRef | None = PrivateAttr(default=None)  # None after a pickle: shown as text
    _on_miss: OnMiss = PrivateAttr(default="text")

    def get_content(self, metadata_mode: MetadataMode = MetadataMode.NONE) -> str:
        if metadata_mode != MetadataMode.LLM:
            content: str = super().get_content(metadata_mode)  # type: ignore[safe-super]
            return content
        shown, header = self._shown(), self.get_metadata_str(MetadataMode.LLM).strip()
        if not header:
            return shown
        template: str = self.text_template  # type: ignore[attr-defined]  # of all subclasses
        return template.format(content=shown, metadata_str=header).strip()

    def get_content_blocks(
        self, metadata_mode: MetadataMode = MetadataMode.NONE
    ) -> list[BaseContentBlock]:
        blocks: list[BaseContentBlock] = super().get_content_blocks(metadata_mode)  # type: ignore[safe-super]
        if metadata_mode != MetadataMode.LLM:
            return blocks
        body = TextBlock(text=self.get_content(MetadataMode.NONE))
        return [TextBlock(text=self._shown()) if block == body else block for block in blocks]

    def _shown(self) -> str:
        """The handle of the current text, which another postprocessor may have changed."""
        text = self.get_content(MetadataMode.NONE)
        if self._engine is None or not normalise(text):
            return text
        engine = self._engine.engine
        handle = engine.issue_handle(text)
        if handle is None and self._on_miss != "text":
            engine.announce([text], self._on_miss, names=[f"node {self.node_id!r}"], remedy=_REMEDY)
            handle = engine.issue_handle(text)
        return handle or text


class _TextNode(_ShownAsHandle, TextNode):
    pass


class _Document(_ShownAsHandle, Document):
    pass


_SHOWN_AS_HANDLE: dict[type[BaseNode], type[_ShownAsHandle]] = {
    TextNode: _TextNode,
    Document: _Document,
}
