"""From a sequence's tokens to the text its client sees, and to its end."""

from __future__ import annotations

from serving.core import FinishReason, RequestOutput, TokenLogprobs
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
        self._filter = StopStringFilter(sampling.stop, include=sampling.include_stop_str_in_output)
        eos = () if sampling.ignore_eos else tokenizer.eos_token_ids
        self._stop_ids = frozenset((*sampling.stop_token_ids, *eos))

    def add(
        self, token: int, logprobs: TokenLogprobs | None = None
    ) -> tuple[RequestOutput, FinishReason | None]:
        """Append a token to the sequence; the news of it, and why it is the last, if it is.

        A request for no tokens at all ends with its first, which nobody sees.
        """
        sequence = self.sequence
        if not sequence.request.sampling.max_tokens:
            return self._output("", (), (), FinishReason.LENGTH), FinishReason.LENGTH
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
        news = () if logprobs is None else (logprobs,)
        return self._output(text, (token,), news, reason), reason

    def _output(
        self,
        text: str,
        token_ids: tuple[int, ...],
        logprobs: tuple[TokenLogprobs, ...],
        reason: FinishReason | None,
    ) -> RequestOutput:
        sequence, sampling = self.sequence, self.sequence.request.sampling
        first = sequence.output_length <= 1
        return RequestOutput(
            request_id=sequence.request.request_id,
            text=text,
            token_ids=token_ids,
            prompt_tokens=sequence.prompt_length,
            completion_tokens=sequence.output_length,
            finish_reason=reason,
            stop_reason=sequence.stop_reason,
            logprobs=None if sampling.logprobs is None else logprobs,
            prompt_logprobs=(None, *sequence.prompt_logprobs)
            if first and sampling.prompt_logprobs is not None
            else None,
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
