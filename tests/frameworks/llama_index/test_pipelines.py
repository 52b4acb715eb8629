"""LlamaIndex's pipelines answer from chunk caches as from full prefill, every chunk a hit.

Everything is LlamaIndex as one would write it, with its own prompts. Where the built-in model is
too small for a part (choosing a tool, splitting a question), that part is scripted and says so.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from llama_index.core import Document, Settings, StorageContext, VectorStoreIndex
from llama_index.core.agent.react.formatter import ReActChatFormatter
from llama_index.core.agent.react.types import ObservationReasoningStep
from llama_index.core.agent.workflow import ReActAgent
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.chat_engine import CondensePlusContextChatEngine, ContextChatEngine
from llama_index.core.ingestion import DocstoreStrategy, IngestionPipeline
from llama_index.core.llms import ChatMessage, ChatResponse, MessageRole
from llama_index.core.llms.mock import MockLLM
from llama_index.core.memory import Memory
from llama_index.core.node_parser import (
    NodeParser,
    SentenceSplitter,
)
from llama_index.core.postprocessor import (
    LongContextReorder,
    SimilarityPostprocessor,
)
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.query_engine import (
    CitationQueryEngine,
    RetrieverQueryEngine,
    RouterQueryEngine,
    SubQuestionQueryEngine,
)
from llama_index.core.question_gen.types import BaseQuestionGenerator, SubQuestion
from llama_index.core.response_synthesizers import ResponseMode
from llama_index.core.schema import BaseNode, MetadataMode, NodeWithScore, QueryBundle
from llama_index.core.selectors import EmbeddingSingleSelector
from llama_index.core.storage.docstore import SimpleDocumentStore
from llama_index.core.tools import QueryEngineTool, RetrieverTool
from llama_index.vector_stores.chroma import ChromaVectorStore

from benchmarks.datasets import Question
from llama_index.llms.samkv import SamKVCacheTransform, SamKVLLM
from llama_index.llms.samkv.quickstart import OfflineEmbedding
from llama_index.postprocessor.samkv import SamKVPostprocessor
from samkv_integrations import ChunkStore, Engine
from samkv_integrations.chroma.client import open_collection
from samkv_integrations.lab.evaluation import f1_words
from samkv_integrations.store.chunk import normalise
from tests.support.pipelines import (
    TOP_K,
    TURNS,
    Ask,
    Asked,
    assert_answers_from_caches,
    bodies_in,
    questions,
    title_of,
)
from tests.support.records import builtin

# of LlamaIndex's agents, about themselves
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

MAX_NEW_TOKENS = 32
"""Room for a question that a chat engine has condensed; the answers are far shorter."""


# -- what is asked about ---------------------------------------------------------------------


class Library:
    """The documents of the questions in one folder, indexed in as many ways as pipelines need.

    One store holds the caches of all indexes. Close it after use.
    """

    def __init__(self, folder: Path, asked: Sequence[Question]) -> None:
        self.exits = ExitStack()
        # LlamaIndex makes a remote model wherever it was given none: none of that here
        self.exits.enter_context(mock.patch.object(Settings, "_llm", MockLLM()))
        self.folder = folder
        self.questions = tuple(asked)
        self.engine = Engine(builtin(), ChunkStore(folder / "kv"))
        self.collections: dict[str, Any] = {}
        self._made: dict[str, Any] = {}

    def close(self) -> None:
        self.exits.close()

    def once(self, name: str, make: Callable[[], Any]) -> Any:
        """What ``make`` returned the first time for this name."""
        if name not in self._made:
            self._made[name] = make()
        return self._made[name]

    def documents(self) -> list[Document]:
        """Each with its path, which prompts show, as they do for files that LlamaIndex reads."""
        return [
            Document(
                text=body,
                doc_id=title_of(body),
                metadata={"file_path": f"records/{title_of(body).lower().replace(' ', '-')}.txt"},
                excluded_embed_metadata_keys=["file_path"],
            )
            for question in self.questions
            for body in question.documents
        ]

    def chroma(self, name: str) -> ChromaVectorStore:
        collection = open_collection(self.folder / "chroma", name, create=True)
        self.collections[name] = collection
        return ChromaVectorStore(chroma_collection=collection)

    def index(
        self, name: str, nodes: Sequence[BaseNode], docstore: SimpleDocumentStore | None = None
    ) -> VectorStoreIndex:
        """An index of ``nodes`` in a Chroma collection of that name."""
        storage = StorageContext.from_defaults(vector_store=self.chroma(name), docstore=docstore)
        return VectorStoreIndex(nodes, storage_context=storage, embed_model=OfflineEmbedding())

    def parsed(
        self,
        documents: Sequence[Document] | None = None,
        parser: NodeParser | None = None,
    ) -> list[BaseNode]:
        """Nodes of the documents, their texts cached."""
        documents = self.documents() if documents is None else documents
        nodes = (parser or SentenceSplitter(chunk_size=512)).get_nodes_from_documents(documents)
        return list(SamKVCacheTransform(engine=self.engine)(nodes))

    def records(self) -> VectorStoreIndex:
        """The index that pipelines use who need no other."""
        return self.once("records", lambda: self.index("records", self.parsed()))


# -- how it is asked -------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a pipeline is built with.

    way: how it is told of the caches: by texts, or handles, of a postprocessor, or not at all
    (plain). exits: what must be closed after the last question.
    """

    library: Library
    way: str
    method: str
    exits: ExitStack = field(default_factory=ExitStack)

    def llm(self, kind: type[SamKVLLM] = SamKVLLM, **options: Any) -> SamKVLLM:
        return kind(
            engine=self.library.engine,
            method=self.method,
            max_new_tokens=MAX_NEW_TOKENS,
            **({"match_text": False} if self.way == "handle" else {}),
            **options,
        )

    def postprocessors(self) -> list[BaseNodePostprocessor]:
        """Ours, or none at all."""
        if self.way == "plain":
            return []
        return [SamKVPostprocessor(engine=self.library.engine, mode=self.way)]

    def retriever(self, top_k: int = TOP_K) -> BaseRetriever:
        return self.library.records().as_retriever(similarity_top_k=top_k)


# -- ways of asking --------------------------------------------------------------------------


def _texts(nodes: Sequence[NodeWithScore]) -> tuple[str, ...]:
    return tuple(normalise(found.node.get_content(MetadataMode.NONE)) for found in nodes)


def _visible(nodes: Sequence[NodeWithScore]) -> tuple[str, ...]:
    """All that a user sees of sources, and all that a program may store of them."""
    return tuple(
        text
        for found in nodes
        for text in (found.get_content(), str(found), repr(found), found.model_dump_json())
    )


def _asked(answer: str, response: Any) -> Asked:
    nodes = response.source_nodes
    chunks = [found for found in nodes if not found.node.get_content().startswith("Sub question:")]
    return Asked(
        answer=answer,
        retrieved=tuple(re.sub(r"^Source \d+:\n", "", text) for text in _texts(chunks)),
        shown=(response.get_formatted_sources(length=10_000), *_visible(nodes)),
    )


def _of_query_engine(engine: Any, *, streaming: bool = False, use_async: bool = False) -> Ask:
    def ask(question: str) -> Asked:
        response = engine.query(question)
        return _asked("".join(response.response_gen) if streaming else str(response), response)

    async def aask(question: str) -> Asked:
        response = await engine.aquery(question)
        if not streaming:
            return _asked(str(response), response)
        return _asked("".join([piece async for piece in response.async_response_gen()]), response)

    return (lambda question: asyncio.run(aask(question))) if use_async else ask


class _Chats:
    """Chats of `TURNS` questions each: a question is a follow-up of those before it."""

    def __init__(self, start: Callable[[], Any], *, streaming: bool, runner: asyncio.Runner | None):
        self._start = start
        self._streaming = streaming
        self._runner = runner
        self._n_asked = 0
        self._chat: Any = None

    def __call__(self, question: str) -> Asked:
        if self._n_asked % TURNS == 0:
            self._chat = self._start()
        self._n_asked += 1
        if self._runner is None:
            answer, response = self._ask(question)
        else:
            answer, response = self._runner.run(self._aask(question))
        memory = [message.model_dump_json() for message in self._chat.chat_history]
        assert len(memory) == 2 * ((self._n_asked - 1) % TURNS + 1)
        return Asked(
            answer=answer,
            retrieved=_texts(response.source_nodes),
            shown=(
                *memory,
                *(str(source) for source in response.sources),
                *_visible(response.source_nodes),
            ),
        )

    def _ask(self, question: str) -> tuple[str, Any]:
        if not self._streaming:
            response = self._chat.chat(question)
            return str(response), response
        response = self._chat.stream_chat(question)
        return "".join(response.response_gen), response

    async def _aask(self, question: str) -> tuple[str, Any]:
        if not self._streaming:
            response = await self._chat.achat(question)
            return str(response), response
        response = await self._chat.astream_chat(question)
        return "".join([piece async for piece in response.async_response_gen()]), response


# -- pipelines -------------------------------------------------------------------------------

Make = Callable[[Setting], Ask]


def _query(mode: str = "compact", *, streaming: bool = False, use_async: bool = False) -> Make:
    def make(setting: Setting) -> Ask:
        engine = RetrieverQueryEngine.from_args(
            setting.retriever(),
            llm=setting.llm(),
            response_mode=mode,
            node_postprocessors=setting.postprocessors(),
            streaming=streaming,
            use_async=use_async,
        )
        return _of_query_engine(engine, streaming=streaming, use_async=use_async)

    return make


def _citation(setting: Setting) -> Ask:
    engine = CitationQueryEngine.from_args(
        setting.library.records(),
        llm=setting.llm(),
        retriever=setting.retriever(),
        node_postprocessors=setting.postprocessors(),
    )
    return _of_query_engine(engine)


def _chat(kind: Any, *, streaming: bool = False, use_async: bool = False) -> Make:
    def make(setting: Setting) -> Ask:
        llm = setting.llm()

        def start() -> Any:
            return kind.from_defaults(
                retriever=setting.retriever(),
                llm=llm,
                node_postprocessors=setting.postprocessors(),
            )

        runner = setting.exits.enter_context(asyncio.Runner()) if use_async else None
        return _Chats(start, streaming=streaming, runner=runner)

    return make


def _halves(setting: Setting, llm: SamKVLLM) -> list[QueryEngineTool]:
    """Two query engines as tools, each over half of the documents, described by their titles."""
    library = setting.library
    tools = []
    for half in (0, 1):
        documents = library.documents()[half::2]
        name = f"half-{half}"
        index = library.once(name, lambda n=name, d=documents: library.index(n, library.parsed(d)))
        engine = index.as_query_engine(
            llm=llm,
            similarity_top_k=TOP_K,
            node_postprocessors=setting.postprocessors(),
        )
        titles = ", ".join(document.doc_id for document in documents)
        tools.append(QueryEngineTool.from_defaults(engine, name=name, description=titles))
    return tools


def _router(setting: Setting) -> Ask:
    """The tool is chosen by the offline embedding; the model is too small to choose."""
    llm = setting.llm()
    engine = RouterQueryEngine.from_defaults(
        _halves(setting, llm),
        llm=llm,
        selector=EmbeddingSingleSelector.from_defaults(OfflineEmbedding()),
    )
    return _of_query_engine(engine)


class _ToolsThatKnow(BaseQuestionGenerator):
    """Asks the question itself, of every tool that has a document about what it names.

    The model is too small to split a question or to choose a tool.
    """

    def _get_prompts(self) -> dict[str, Any]:
        return {}

    def _update_prompts(self, prompts: Any) -> None: ...

    def generate(self, tools: Sequence[Any], query: QueryBundle) -> list[SubQuestion]:
        return [
            SubQuestion(sub_question=query.query_str, tool_name=tool.name)
            for tool in tools
            if any(title in query.query_str for title in tool.description.split(", "))
        ]

    async def agenerate(self, tools: Sequence[Any], query: QueryBundle) -> list[SubQuestion]:
        return self.generate(tools, query)


def _sub_questions(setting: Setting) -> Ask:
    llm = setting.llm()
    engine = SubQuestionQueryEngine.from_defaults(
        _halves(setting, llm),
        llm=llm,
        question_gen=_ToolsThatKnow(),
        verbose=False,
        use_async=False,
    )
    return _of_query_engine(engine)


class _CallsToolFirst(SamKVLLM):
    """Its first reply, the tool call, is scripted; the model is too small to write one."""

    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        last = messages[-1].content or ""
        if last.startswith(("Observation:", "Documents:")):
            return await super().achat(messages, **kwargs)
        content = (
            "Thought: The records will tell.\nAction: records\n"
            f"Action Input: {json.dumps({'input': last})}"
        )
        return ChatResponse(message=ChatMessage(role=MessageRole.ASSISTANT, content=content))


class _AsAQuestion(ReActChatFormatter):
    """Asks about what a tool found in a prompt that the built-in model can read."""

    def format(
        self,
        tools: Sequence[Any],
        chat_history: list[ChatMessage],
        current_reasoning: list[Any] | None = None,
    ) -> list[ChatMessage]:
        steps = current_reasoning or []
        found = [step.observation for step in steps if isinstance(step, ObservationReasoningStep)]
        if not found:
            return super().format(tools, chat_history, current_reasoning)
        content = f"Documents:\n\n{found[-1]}\n\nQuestion: {chat_history[-1].content}"
        return [ChatMessage(role=MessageRole.USER, content=content)]


def _react(setting: Setting) -> Ask:
    llm = setting.llm(_CallsToolFirst)
    tool = RetrieverTool.from_defaults(
        setting.retriever(),
        node_postprocessors=setting.postprocessors(),
        name="records",
        description="Finds records about towns, people, companies and products.",
    )

    async def aask(question: str) -> Asked:
        agent = ReActAgent(tools=[tool], llm=llm, formatter=_AsAQuestion(), streaming=False)
        memory = Memory.from_defaults()
        output = await agent.run(user_msg=question, memory=memory)
        (call,) = output.tool_calls
        nodes = call.tool_output.raw_output
        history = await memory.aget_all()
        return Asked(
            answer=str(output),
            retrieved=_texts(nodes),
            shown=(
                *(message.model_dump_json() for message in history),
                call.tool_output.content,
                *_visible(nodes),
            ),
        )

    return lambda question: asyncio.run(aask(question))


class _SharedWords(BaseNodePostprocessor):
    """A reranker: by the share of the question's words that a node holds."""

    def _postprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        assert query_bundle is not None
        wanted = set(f1_words(query_bundle.query_str))
        for found in nodes:
            words = set(f1_words(found.node.get_content(MetadataMode.EMBED)))
            found.score = len(wanted & words) / len(wanted)
        return sorted(nodes, key=lambda found: -(found.score or 0))[:TOP_K]


def _reranked(setting: Setting) -> Ask:
    engine = RetrieverQueryEngine.from_args(
        setting.retriever(3 * TOP_K),
        llm=setting.llm(),
        node_postprocessors=[
            SimilarityPostprocessor(similarity_cutoff=0.2),
            _SharedWords(),
            LongContextReorder(),
            *setting.postprocessors(),
        ],
    )
    return _of_query_engine(engine)


def _templates(setting: Setting) -> Ask:
    """Headers as users write them, with a field that prompts must not show."""
    library = setting.library

    def make() -> VectorStoreIndex:
        documents = library.documents()
        for place, document in enumerate(documents):
            document.metadata |= {"page_label": str(place), "owner": "nobody's business"}
            document.excluded_embed_metadata_keys = list(document.metadata)
            document.excluded_llm_metadata_keys = ["owner"]
            document.metadata_template = "{key} = {value}"
            document.metadata_separator = " | "
            document.text_template = "Record ({metadata_str}):\n{content}\nEnd of record."
        return library.index("templates", library.parsed(documents))

    engine = library.once("templates", make).as_query_engine(
        llm=setting.llm(), similarity_top_k=TOP_K, node_postprocessors=setting.postprocessors()
    )
    return _of_query_engine(engine)


def _upserted(setting: Setting) -> Ask:
    """Documents of which some were changed, added and deleted since they were first ingested."""
    library = setting.library

    def make() -> VectorStoreIndex:
        now = library.documents()
        before = library.documents()
        for document in before[::2]:
            document.set_content(f"{document.text} This is an old version.")
        gone = Document(text="[Nowhere]\nNowhere is a town that was given up.", doc_id="Nowhere")
        store = library.chroma("upserted")
        pipeline = IngestionPipeline(
            transformations=[
                SentenceSplitter(chunk_size=512),
                SamKVCacheTransform(engine=library.engine),
                OfflineEmbedding(),
            ],
            vector_store=store,
            docstore=SimpleDocumentStore(),
            docstore_strategy=DocstoreStrategy.UPSERTS_AND_DELETE,
        )
        pipeline.run(documents=[*before[1:], gone])
        pipeline.run(documents=now)
        return VectorStoreIndex.from_vector_store(store, embed_model=OfflineEmbedding())

    engine = library.once("upserted", make).as_query_engine(
        llm=setting.llm(), similarity_top_k=TOP_K, node_postprocessors=setting.postprocessors()
    )
    return _of_query_engine(engine)


CHATS = (ContextChatEngine, CondensePlusContextChatEngine)
PIPELINES: Mapping[str, Make] = {
    "compact": _query("compact"),
    "compact, async": _query("compact", use_async=True),
    "compact, streaming": _query("compact", streaming=True),
    "compact, async streaming": _query("compact", streaming=True, use_async=True),
    **{mode: _query(mode) for mode in ("refine", "tree_summarize", "simple_summarize")},
    **{mode: _query(mode) for mode in ("accumulate", "compact_accumulate", "context_only")},
    "CitationQueryEngine": _citation,
    **{kind.__name__: _chat(kind) for kind in CHATS},
    **{f"{kind.__name__}, streaming": _chat(kind, streaming=True) for kind in CHATS},
    "ContextChatEngine, async streaming": _chat(CHATS[0], streaming=True, use_async=True),
    "RouterQueryEngine": _router,
    "SubQuestionQueryEngine": _sub_questions,
    "ReActAgent with RetrieverTool": _react,
    "rerankers": _reranked,
    "metadata templates": _templates,
    "IngestionPipeline, upserts and deletes": _upserted,
}
CASES = [
    *((name, "text") for name in PIPELINES),
    *((name, way) for name in ("compact", CHATS[1].__name__) for way in ("handle", "plain")),
]
"""How chunks are found has nothing to do with the other pipelines, which find them as these do."""


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Library]:
    library = Library(tmp_path_factory.mktemp("few"), questions(2))
    yield library
    library.close()


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Library]:
    """Of a whole chat's questions."""
    library = Library(tmp_path_factory.mktemp("chat"), questions(TURNS))
    yield library
    library.close()


@pytest.mark.parametrize(("name", "way"), CASES)
def test_pipeline(few: Library, chat: Library, name: str, way: str) -> None:
    library = chat if "ChatEngine" in name else few
    with ExitStack() as exits:
        ask, in_full = (
            PIPELINES[name](Setting(library=library, way=way, method=method, exits=exits))
            for method in ("epic", "recompute")
        )
        found = assert_answers_from_caches(library.questions, ask, in_full)
    if "ChatEngine" in name:
        assert all(chat.questions[0].question in prompt for prompt in found[-1].prompts)
        assert found[-1].hits == TOP_K  # the turns before are there without their chunks
    if name == "ReActAgent with RetrieverTool":
        for (prompt,) in (each.prompts for each in found):  # the tool call is scripted
            assert prompt.startswith("Documents:") and "Question:" in prompt
    if way == "handle":
        assert all(bodies_in(prompt, ()) for prompt in found[0].prompts)
    if name == "IngestionPipeline, upserts and deletes":
        rows = few.collections["upserted"].get(include=["documents"])
        assert sorted(rows["documents"]) == sorted(each.text for each in few.documents())


def test_every_response_mode_is_asked() -> None:
    without_chunks = {"no_text", "generation"}  # nothing that was retrieved reaches the model
    assert {mode.value for mode in ResponseMode} - without_chunks <= PIPELINES.keys()
