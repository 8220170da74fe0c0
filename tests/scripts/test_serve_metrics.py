"""What scripts/serve.py tells of itself while it serves."""

import re
import signal

import httpx


def test_status_lines_and_settings_of_the_cache(program):
    process = program("serve.py", "logged", "--port=0", "--max_model_len=64")
    url = process.stdout.readline().split()[3]
    with httpx.Client(base_url=url, timeout=20) as http:
        http.post("/v1/completions", json={"prompt": "slowly", "max_tokens": 5})
        info = re.search(r"vllm:cache_config_info{(.*)} 1.0", http.get("/metrics").text)[1]
    assert 'enable_prefix_caching="True"' in info and 'eviction_policy="lru"' in info
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=20)
    assert process.returncode == 0
    assert "INFO jaxkv.server.periodic_log: prompt throughput: 0.0 tokens/s" in err and "running: 1 requests" in err
