"""A headless Chromium: what a page looks like once its scripts have run."""

import dataclasses
import pathlib
import shutil
import struct
import subprocess
import zlib

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


@dataclasses.dataclass(frozen=True)
class Seen:
    """`dom`: the document as HTML after so many seconds of its time. `picture`: a PNG of the window."""

    dom: str
    picture: pathlib.Path

    def corner(self) -> tuple[int, int, int]:
        """Colour of the picture's first pixel, 0 to 255."""
        data, chunks, place = self.picture.read_bytes(), [], 8
        while place < len(data):
            (length,), kind = struct.unpack_from(">I", data, place), data[place + 4 : place + 8]
            if kind == b"IDAT":
                chunks.append(data[place + 8 : place + 8 + length])
            place += length + 12
        red, green, blue = zlib.decompress(b"".join(chunks))[1:4]  # no filter changes a picture's first pixel
        return red, green, blue


def program() -> str:
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    assert found, "no browser found: apt-get install chromium"
    return found


def look(
    url: str, folder: pathlib.Path, name: str, *, width: int = 1360, height: int = 1500, dark: bool = False,
    milliseconds: int = 5000,
) -> Seen:  # fmt: skip
    """Opens `url` and lets it run for so many milliseconds of the browser's own time, which passes faster than ours.

    The browser can reach nothing but 127.0.0.1.
    """
    picture = folder / f"{name}.png"
    options = [
        "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run",
        "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1", f"--user-data-dir={folder / 'profile'}",
        f"--window-size={width},{height}", f"--virtual-time-budget={milliseconds}",
        # 0 is dark, 1 is light.
        f"--blink-settings=preferredColorScheme={0 if dark else 1}",
    ]  # fmt: skip
    run = [program(), *options]
    dom = subprocess.run([*run, "--dump-dom", url], capture_output=True, text=True, timeout=120)
    shot = subprocess.run([*run, f"--screenshot={picture}", url], capture_output=True, text=True, timeout=120)
    assert dom.returncode == 0 and shot.returncode == 0 and picture.exists(), dom.stderr + shot.stderr
    return Seen(dom.stdout, picture)
