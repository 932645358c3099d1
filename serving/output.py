"""From a sequence's tokens to the text its client sees, and to its end."""

from __future__ import annotations

from serving.core import FinishReason, RequestOutput
from serving.detokenizer import IncrementalDetokenizer
from serving.sequence import Sequence
from serving.stop_strings import StopStringFilter
from serving.tokenizer import Tokenizer


class OutputStream:
    """One sequence's text. Knows when its tokens end it; the engine carries that out."""

    def __init__(self, sequence: Sequence, tokenizer: Tokenizer) -> None:
        self.sequence = sequence
        sampling = sequence.request.sampling
        self._detokenizer = IncrementalDetokenizer(tokenizer, sequence.request.prompt_token_ids)
        self._filter = StopStringFilter(sampling.stop)
        eos = () if sampling.ignore_eos else tokenizer.eos_token_ids
        self._stop_ids = frozenset((*sampling.stop_token_ids, *eos))

    def add(self, token: int) -> tuple[RequestOutput, FinishReason | None]:
        """Append a token to the sequence; the news of it, and why it is the last, if it is."""
        sequence = self.sequence
        sequence.token_ids.append(token)
        reason: FinishReason | None = None
        text = ""
        if token in self._stop_ids:
            reason = FinishReason.STOP
            is_eos = token not in sequence.request.sampling.stop_token_ids
            sequence.stop_reason = None if is_eos else token
        else:
            text = self._push(self._detokenizer.add([token]))
            if sequence.stop_reason is not None:
                reason = FinishReason.STOP
            elif sequence.output_length >= sequence.request.sampling.max_tokens:
                reason = FinishReason.LENGTH
        if reason is not None and not isinstance(sequence.stop_reason, str):
            text += self._push(self._detokenizer.finish())
            if isinstance(sequence.stop_reason, str):
                reason = FinishReason.STOP
            else:
                text += self._filter.flush()
        return self.output(text, (token,), reason), reason

    def output(
        self, text: str, token_ids: tuple[int, ...], reason: FinishReason | None
    ) -> RequestOutput:
        sequence = self.sequence
        return RequestOutput(
            request_id=sequence.request.request_id,
            text=text,
            token_ids=token_ids,
            prompt_tokens=sequence.prompt_length,
            completion_tokens=sequence.output_length,
            finish_reason=reason,
            stop_reason=sequence.stop_reason,
        )

    def _push(self, text: str) -> str:
        """Text that is safe to show; a stop string in it ends the sequence.

        Before min_tokens a stop string is ordinary text.
        """
        if self.sequence.output_length <= self.sequence.request.sampling.min_tokens:
            return text
        safe, matched = self._filter.push(text)
        if matched is not None:
            self.sequence.stop_reason = matched
        return safe
