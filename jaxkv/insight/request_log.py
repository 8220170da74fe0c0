"""The request log: a line of JSON for each request that has ended, written beside the engine."""

import dataclasses
import logging
import os
import queue
import threading

from jaxkv.control.request_state import RequestState
from jaxkv.core.errors import ConfigError
from jaxkv.core.request_record import RequestRecord, block_name

logger = logging.getLogger(__name__)

# Ended requests that may wait for the disk; each keeps its tokens in memory so long.
MOST_WAITING = 1024


class RequestLog:
    """Appends to a file from a thread of its own: whoever calls `put` never waits, and no error of the disk reaches it.

    Attributes:
      failed: the error that ended the log, or None. num_lost: records that found too many waiting.
    """

    def __init__(self, path: str, *, token_ids: bool = False):
        """
        Args:
          token_ids: write those of prompt and output, which can be turned back into texts.

        Raises:
          ConfigError: the file cannot be opened for appending.
        """
        try:
            # Readable by its owner only: it tells who asked when, and with token ids what.
            self._path = path
            self._file = open(os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600), "w", encoding="utf-8")
            self._end_broken_line()
        except OSError as error:
            raise ConfigError(
                f"request_log is {path}, which cannot be written: {error.strerror}; choose another file"
            ) from error
        self._token_ids = token_ids
        self.failed: str | None = None
        self.num_lost = 0
        self._waiting: queue.Queue[tuple[RequestRecord, RequestState, int] | None] = queue.Queue(MOST_WAITING)
        self._thread = threading.Thread(target=self._run, name="jaxkv-request-log", daemon=True)
        self._thread.start()

    def put(self, record: RequestRecord, state: RequestState, block_size: int) -> None:
        """`state`: of the same request, which has ended; its tokens and blocks are added to the record."""
        if self.failed is not None:
            return
        try:
            self._waiting.put_nowait((record, state, block_size))
        except queue.Full:
            self.num_lost += 1
            if self.num_lost == 1:
                logger.warning("the request log %s loses records: the disk is too slow", self._path)

    def close(self, timeout: float = 10.0) -> None:
        """Write what waits, for at most so many seconds."""
        try:
            self._waiting.put(None, timeout=timeout)
        except queue.Full:
            return
        self._thread.join(timeout)

    def _end_broken_line(self) -> None:
        """What a full disk cut short last time must not swallow the first record of this one."""
        file = self._file.fileno()
        size = os.fstat(file).st_size
        if size and os.path.isfile(self._path) and os.pread(file, 1, size - 1) != b"\n":
            os.write(file, b"\n")

    def _run(self) -> None:
        with_end = False
        while not with_end:
            entries = [self._waiting.get()]
            while not self._waiting.empty():
                entries.append(self._waiting.get())
            with_end = None in entries
            if self.failed is None:
                self._write([entry for entry in entries if entry is not None])
        try:
            self._file.close()
        except OSError as error:
            self._fail(error)

    def _write(self, entries: list[tuple[RequestRecord, RequestState, int]]) -> None:
        try:
            for entry in entries:
                self._file.write(self._line(*entry))
            self._file.flush()
        except OSError as error:
            self._fail(error)

    def _fail(self, error: OSError) -> None:
        if self.failed is None:
            self.failed = error.strerror or str(error)
            logger.error("the request log %s ends here: %s", self._path, self.failed)

    def _line(self, record: RequestRecord, state: RequestState, block_size: int) -> str:
        state.extend_hashes(block_size)  # of the blocks that nobody had a use for yet
        hashes = state.unsalted_hashes if state.is_salted else state.block_hashes
        added = {"block_size": block_size, "blocks": tuple(map(block_name, hashes))}
        if self._token_ids:
            added["prompt_token_ids"] = state.request.prompt_token_ids
            added["output_token_ids"] = tuple(state.token_ids[state.num_prompt_tokens :])
        return dataclasses.replace(record, **added).to_json() + "\n"
