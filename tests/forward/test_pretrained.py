"""On a pretrained model, with its tied head and its tokenizer, the selective pass is upstream's."""

import pytest
import torch
from arlopti_testing.forward_models import actors
from transformers import AutoTokenizer

from arlopti_openrlhf.lab.scoring.inputs import encode

PROMPTS = ["What is 17 + 25?", "Who lies?"]
ANSWERS = [["The answer is 42.<|im_end|>", "Let us add them up.\n\n1. First"], ["Zoey is a knave.<|im_end|>"]]


@pytest.mark.long
def test_smollm2_equals_upstream(smollm2):
    """Log-probs and entropies of answers, and the gradient of the embedding, which is the head too."""
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    _, prompts = encode(tokenizer, [[{"role": "user", "content": text}] for text in PROMPTS])
    pairs = [(p, tokenizer.encode(a)) for p, answers in zip(prompts, ANSWERS, strict=True) for a in answers]
    length = max(len(prompt) + len(answer) for prompt, answer in pairs)
    sequences = torch.full((len(pairs), length), tokenizer.pad_token_id)
    attention_mask, action_mask = torch.zeros_like(sequences), torch.zeros_like(sequences[:, 1:])
    for i, (prompt, answer) in enumerate(pairs):
        ids = torch.tensor(prompt + answer)
        sequences[i, : len(ids)], attention_mask[i, : len(ids)] = ids, 1
        action_mask[i, len(prompt) - 1 : len(ids) - 1] = 1
    results = []
    for actor in actors(str(smollm2)):
        log_probs, output = actor(
            sequences, action_mask, attention_mask=attention_mask, return_output=True, return_entropy=True
        )
        entropy = output.entropy[:, -action_mask.shape[1] :] * action_mask
        (log_probs * action_mask).sum().backward()
        embedding = actor.model.get_input_embeddings().weight
        assert embedding is actor.model.get_output_embeddings().weight
        results.append((log_probs.detach() * action_mask, entropy.detach(), embedding.grad))
        actor.zero_grad()  # frees the gradients, of 0.5 GB
    (log_probs, entropy, gradient), (ours, our_entropy, our_gradient) = results
    torch.testing.assert_close(ours, log_probs, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(our_entropy, entropy, rtol=1e-4, atol=1e-4)
    assert (our_gradient - gradient).norm() <= 1e-4 * gradient.norm() and gradient.norm() > 0.1
    # Fluent answers are likely ones: a broken tokenizer or head would show.
    assert -5 < ours.sum() / action_mask.sum() < -0.5
    assert actor.shortcuts.reason_not_to_share is None and actor.shortcuts.fuses_head
