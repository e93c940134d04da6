"""Fine-tuning data: conversations, prompts with answers, texts and preference pairs, as documents with targets.

folder = prepare_documents(DocumentPreparation(tokenizer="runs/tiny/tokenizer", sequence=256), cache="data")
documents = DocumentSet(folder, "train")
documents.tokens(0), documents.trained(0)
"""

from __future__ import annotations

from rush.data.conversations.documents_manifest import (
    DocumentManifest,
    holds_documents,
    read_document_manifest,
    verify_documents,
)
from rush.data.conversations.encode import Encoded, encode, encode_prompt
from rush.data.conversations.preparation import DocumentPreparation
from rush.data.conversations.prepare import prepare_documents
from rush.data.conversations.store import DocumentSet
from rush.data.conversations.templates import Template, find_template
from rush.data.conversations.turns import Conversation, Pair, Text, Turn

__all__ = [
    "Conversation",
    "DocumentManifest",
    "DocumentPreparation",
    "DocumentSet",
    "Encoded",
    "Pair",
    "Template",
    "Text",
    "Turn",
    "encode",
    "encode_prompt",
    "find_template",
    "holds_documents",
    "prepare_documents",
    "read_document_manifest",
    "verify_documents",
]
