"""Encoder-decoders: models whose decoder blocks all read the last value of the encoder."""

import torch
import transformers as hf

from tests.zoo.batch import VOCABULARY, WIDTH, Example, noise, padded, ready, scrambled, tokens


def t5() -> Example:
    """T5: a table of relative positions in the first block serves all others; the embedding is shared."""
    torch.manual_seed(0)
    config = hf.T5Config(
        vocab_size=VOCABULARY,
        d_model=WIDTH,
        d_kv=8,
        d_ff=2 * WIDTH,
        num_layers=3,
        num_heads=4,
        decoder_start_token_id=0,
    )
    model = scrambled(hf.T5ForConditionalGeneration(config))
    return ready(model, input_ids=tokens(), attention_mask=padded(), labels=tokens(length=9, seed=3))


def bart() -> Example:
    """BART: embedding shared by encoder, decoder and head; LayerDrop off."""
    torch.manual_seed(0)
    config = hf.BartConfig(
        vocab_size=VOCABULARY,
        d_model=WIDTH,
        encoder_layers=3,
        decoder_layers=3,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=2 * WIDTH,
        decoder_ffn_dim=2 * WIDTH,
        max_position_embeddings=32,
    )
    model = scrambled(hf.BartForConditionalGeneration(config))
    return ready(model, input_ids=tokens(), attention_mask=padded(), labels=tokens(length=9, seed=3))


def whisper() -> Example:
    """Whisper: convolutions over a spectrogram, then encoder and decoder."""
    torch.manual_seed(0)
    config = hf.WhisperConfig(
        vocab_size=VOCABULARY,
        d_model=WIDTH,
        encoder_layers=3,
        decoder_layers=3,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=2 * WIDTH,
        decoder_ffn_dim=2 * WIDTH,
        num_mel_bins=8,
        max_source_positions=16,
        max_target_positions=16,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=3,
    )
    model = scrambled(hf.WhisperForConditionalGeneration(config))
    return ready(model, input_features=noise(2, 8, 32), labels=tokens(length=9, seed=3))
