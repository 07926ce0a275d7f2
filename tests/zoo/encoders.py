"""Encoders: BERT and its family with their heads, from transformers configs."""

import torch
import transformers as hf

from tests.zoo.batch import LAYERS, VOCABULARY, WIDTH, Example, padded, ready, scrambled, tokens

_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "intermediate_size": 2 * WIDTH,
    "max_position_embeddings": 40,
}


def _bert(kind: type[hf.PreTrainedModel], num_labels: int = 3, **labels: torch.Tensor) -> Example:
    torch.manual_seed(0)
    model = scrambled(kind(hf.BertConfig(**_SIZES, num_labels=num_labels)))
    return ready(model, input_ids=tokens(), attention_mask=padded(), **labels)


def bert_sequence_classification() -> Example:
    """BERT with a pooler and a class per row."""
    return _bert(hf.BertForSequenceClassification, labels=torch.tensor([0, 2]))


def bert_masked_lm() -> Example:
    """BERT with a head tied to its embedding."""
    return _bert(hf.BertForMaskedLM, labels=tokens(seed=3))


def bert_question_answering() -> Example:
    """BERT with two positions as labels."""
    first, last = torch.tensor([1, 3]), torch.tensor([4, 7])
    return _bert(hf.BertForQuestionAnswering, 2, start_positions=first, end_positions=last)


def bert_token_classification() -> Example:
    """BERT with a class per token."""
    return _bert(hf.BertForTokenClassification, labels=tokens(seed=3, below=7) % 3)


def roberta() -> Example:
    """RoBERTa: positions are counted from the tokens that are no padding."""
    torch.manual_seed(0)
    model = scrambled(hf.RobertaForMaskedLM(hf.RobertaConfig(**_SIZES)))
    ids = tokens()
    ids[1, -3:] = model.config.pad_token_id
    return ready(model, input_ids=ids, attention_mask=(ids != model.config.pad_token_id).long(), labels=tokens(seed=3))


def distilbert() -> Example:
    """DistilBERT with a class per row."""
    torch.manual_seed(0)
    config = hf.DistilBertConfig(
        vocab_size=VOCABULARY, dim=WIDTH, hidden_dim=2 * WIDTH, n_layers=LAYERS, n_heads=4, max_position_embeddings=32
    )
    model = scrambled(hf.DistilBertForSequenceClassification(config))
    return ready(model, input_ids=tokens(), attention_mask=padded(), labels=torch.tensor([1, 0]))


def modernbert() -> Example:
    """ModernBERT: local and global attention with two rotary tables."""
    torch.manual_seed(0)
    config = hf.ModernBertConfig(
        **_SIZES,
        pad_token_id=0,
        cls_token_id=1,
        sep_token_id=2,
        bos_token_id=1,
        eos_token_id=2,
        local_attention=8,
        global_attn_every_n_layers=2,
    )
    model = scrambled(hf.ModernBertForMaskedLM._from_config(config, attn_implementation="sdpa"))
    return ready(model, input_ids=tokens(), attention_mask=padded(), labels=tokens(seed=3))


def deberta_v2() -> Example:
    """DeBERTa-v2: relative positions in both directions, its own dropout."""
    torch.manual_seed(0)
    config = hf.DebertaV2Config(
        **_SIZES,
        relative_attention=True,
        pos_att_type=["p2c", "c2p"],
        position_buckets=8,
        norm_rel_ebd="layer_norm",
        share_att_key=True,
        num_labels=3,
    )
    model = scrambled(hf.DebertaV2ForSequenceClassification(config))
    return ready(model, input_ids=tokens(), attention_mask=padded(), labels=torch.tensor([1, 0]))
