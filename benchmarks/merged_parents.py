"""Prompt tokens from caches where an AutoMergingRetriever merges retrieved nodes into parents.

    python -m benchmarks.merged_parents --model smollm2

Four documents of ten sample paragraphs are split into nodes of 2,048, 512 and 128 tokens, and the
leaves are indexed. Ten questions retrieve six leaves each. Three ways: the leaves are cached; the
leaves are cached, and retrieved nodes without a cache when they are retrieved; all nodes are.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from llama_index.core import StorageContext, VectorStoreIndex
from llama_index.core.node_parser import HierarchicalNodeParser, get_leaf_nodes
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.retrievers import AutoMergingRetriever
from llama_index.core.schema import Document

from llama_index.llms.samkv import SamKVCacheTransform, SamKVLLM
from llama_index.llms.samkv.quickstart import OfflineEmbedding
from llama_index.postprocessor.samkv import SamKVPostprocessor

PARAGRAPHS = Path(__file__).parents[1] / "examples" / "paragraphs"
N_PARAGRAPHS, A_DOCUMENT, A_QUESTION = 40, 10, 4
WAYS = ("leaves cached", "leaves, and on_miss='compute'", "all nodes cached")


def main() -> None:
    """Print a row for each way."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--method", default="epic")
    given = parser.parse_args()
    files = sorted(PARAGRAPHS.glob("*.txt"))[:N_PARAGRAPHS]
    texts = [file.read_text(encoding="utf-8").strip() for file in files]
    documents = [
        Document(text="\n\n".join(texts[first : first + A_DOCUMENT]))
        for first in range(0, N_PARAGRAPHS, A_DOCUMENT)
    ]
    nodes = HierarchicalNodeParser.from_defaults(
        chunk_sizes=[2048, 512, 128], chunk_overlap=0
    ).get_nodes_from_documents(documents)
    leaves = get_leaf_nodes(nodes)
    for way in WAYS:
        llm = SamKVLLM(
            model_name=given.model, max_new_tokens=1, method=given.method, prefix_bytes=0
        )
        SamKVCacheTransform(llm=llm)(nodes if way == WAYS[2] else leaves)
        storage = StorageContext.from_defaults()
        storage.docstore.add_documents(nodes)
        index = VectorStoreIndex(leaves, storage_context=storage, embed_model=OfflineEmbedding())
        engine = RetrieverQueryEngine.from_args(
            AutoMergingRetriever(index.as_retriever(similarity_top_k=6), storage),
            llm=llm,
            node_postprocessors=[SamKVPostprocessor(llm=llm, on_miss="compute")]
            if way == WAYS[1]
            else [],
        )
        n_prompt = n_cached = n_computed = 0
        for text in texts[::A_QUESTION]:
            engine.query(f"What is told of: {text[:60]}?")
            report = llm.last_report
            assert report is not None
            n_prompt += report.prompt_tokens
            n_cached += report.cached_tokens
            n_computed += report.computed_now
        print(f"{way}: {n_cached} of {n_prompt} tokens cached, {n_computed} nodes computed")


if __name__ == "__main__":
    main()
