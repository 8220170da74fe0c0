"""Runs vLLM for vllm_contender.py: settings as the first argument, then one JSON line in and one out for each batch.

Imports nothing of jaxkv: it runs in the interpreter that has vLLM.
"""

import json
import os
import sys
import time


def main() -> None:
    # vLLM and its libraries print on stdout, and so do processes that it starts: keep that for the protocol alone.
    lines = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # so that process_time counts the engine too

    from vllm import LLM, SamplingParams

    settings = json.loads(sys.argv[1])
    llm = LLM(skip_tokenizer_init=True, enable_prefix_caching=False, disable_log_stats=True, seed=0, **settings)

    def answer(document: dict) -> None:
        lines.write(json.dumps(document) + "\n")
        lines.flush()

    answer({"seconds": 0.0, "cpu_seconds": 0.0})
    for line in sys.stdin:
        request = json.loads(line)
        prompts = [{"prompt_token_ids": ids} for ids in request["prompts"]]
        count = request["output_len"]
        sampling = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
        begin, cpu_begin = time.perf_counter(), time.process_time()
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        seconds, cpu_seconds = time.perf_counter() - begin, time.process_time() - cpu_begin
        lengths = [len(output.outputs[0].token_ids) for output in outputs]
        if lengths != [count] * len(prompts):
            raise RuntimeError(f"expected {len(prompts)} outputs of {count} tokens, got lengths {lengths}")
        answer({"seconds": seconds, "cpu_seconds": cpu_seconds})


if __name__ == "__main__":
    main()
