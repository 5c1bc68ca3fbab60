"""Two models without a batch dimension, for `worker_instances.py`: a voice and a picture, with random weights.

Does: what such models do to a device, that is thousands of small operations, each waiting for the last. The voice writes one mel
frame after the other (recurrent, and every few frames the CPU asks whether it is done) and makes sound of them with transposed
convolutions; the picture is 20 steps of a small U-Net. Does not: say anything, or show anything.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from tonle.errors import InvalidRequest, TonleError
from tonle.workers.kind import Job, Kind, Result

SEED = 7
MELS = 80
HOP = 256  # samples of sound per frame
RATE = 22050  # Hz
LOOK_EVERY = 8  # frames between two questions whether the voice is done
STEPS = 20  # of the picture
SIDE = 32  # of the picture's latents


class Voice(nn.Module):
    """As Tacotron with HiFi-GAN: a recurrent decoder, then a convolutional vocoder."""

    def __init__(self, width: int) -> None:
        super().__init__()
        states = 256 * width
        self.letters = nn.Embedding(256, states)
        self.before = nn.Sequential(nn.Linear(MELS, states), nn.ReLU(), nn.Linear(states, states), nn.ReLU())
        self.first, self.second = nn.GRUCell(2 * states, states), nn.GRUCell(states, states)
        self.frame = nn.Linear(states, MELS + 1)  # its last number would say "done" if it had learned to
        channels = 128 * width
        self.enter = nn.Conv1d(MELS, channels, 7, padding=3)
        self.ups, self.blocks = nn.ModuleList(), nn.ModuleList()
        for factor in (8, 8, 4):  # together HOP
            self.ups.append(nn.ConvTranspose1d(channels, channels // 2, 2 * factor, factor, factor // 2))
            channels //= 2
            self.blocks.append(
                nn.ModuleList(
                    nn.Conv1d(channels, channels, 3, padding=dilation, dilation=dilation) for dilation in (1, 3, 5)
                )
            )
        self.leave = nn.Conv1d(channels, 1, 7, padding=3)

    def forward(self, letters: Tensor, num_frames: int) -> Tensor:
        """(letters,) -> (num_frames × HOP,), from -1 to 1."""
        text = self.letters(letters)  # (letters, states)
        frame = text.new_zeros(1, MELS)
        one, two = text.new_zeros(1, text.shape[1]), text.new_zeros(1, text.shape[1])
        frames: list[Tensor] = []
        while len(frames) < num_frames:
            place = len(frames) * len(text) // num_frames  # where a model's attention would be
            one = self.first(torch.cat([self.before(frame), text[place : place + 1]], dim=1), one)
            two = self.second(one, two)
            frame, done = self.frame(one + two).split([MELS, 1], dim=1)
            frames.append(frame)
            if len(frames) % LOOK_EVERY == 0 and not bool(torch.isfinite(done)):  # the CPU waits for the device here
                raise InvalidRequest("the voice lost its way")
        sound = self.enter(torch.cat(frames).T[None])
        for up, block in zip(self.ups, self.blocks, strict=True):
            sound = up(functional.leaky_relu(sound, 0.1))
            for layer in block:  # type: ignore[attr-defined]
                sound = sound + layer(functional.leaky_relu(sound, 0.1))
        return torch.tanh(self.leave(functional.leaky_relu(sound, 0.1)))[0, 0]


class _Block(nn.Module):
    def __init__(self, channels_in: int, channels: int, time_channels: int) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(channels_in, channels, 3, padding=1), nn.Conv2d(channels, channels, 3, padding=1)
        self.norm_one, self.norm_two = nn.GroupNorm(8, channels_in), nn.GroupNorm(8, channels)
        self.time = nn.Linear(time_channels, channels)
        self.skip = nn.Conv2d(channels_in, channels, 1)

    def forward(self, x: Tensor, moment: Tensor) -> Tensor:
        y = self.one(functional.silu(self.norm_one(x))) + self.time(moment)[:, :, None, None]
        out: Tensor = self.skip(x) + self.two(functional.silu(self.norm_two(y)))
        return out


class Picture(nn.Module):
    """A U-Net of three levels that takes noise away."""

    def __init__(self, width: int) -> None:
        super().__init__()
        c = 32 * width
        self.moments = nn.Sequential(nn.Linear(1, c), nn.SiLU(), nn.Linear(c, c))
        self.enter, self.leave = nn.Conv2d(4, c, 3, padding=1), nn.Conv2d(c, 4, 3, padding=1)
        self.down = nn.ModuleList([_Block(c, c, c), _Block(c, 2 * c, c), _Block(2 * c, 2 * c, c)])
        self.middle = nn.ModuleList([_Block(2 * c, 2 * c, c), _Block(2 * c, 2 * c, c)])
        self.up = nn.ModuleList([_Block(4 * c, 2 * c, c), _Block(4 * c, c, c), _Block(2 * c, c, c)])

    def noise(self, x: Tensor, moment: Tensor) -> Tensor:
        """(1, 4, side, side) -> the same."""
        at = self.moments(moment)
        x = self.enter(x)
        skips = []
        for block in self.down:
            x = block(x, at)
            skips.append(x)
            x = functional.avg_pool2d(x, 2)
        for block in self.middle:
            x = block(x, at)
        for block in self.up:
            x = functional.interpolate(x, scale_factor=2.0)
            x = block(torch.cat([x, skips.pop()], dim=1), at)
        out: Tensor = self.leave(x)
        return out

    def forward(self, x: Tensor) -> Tensor:
        for step in range(STEPS):
            moment = x.new_full((1, 1), 1 - step / STEPS)
            x = x - self.noise(x, moment) / STEPS
        return torch.tanh(x)[0]


class Models(Kind):
    """Both. Fields of a job: model (voice, picture), seed, and frames for the voice. Media of a result: int16 samples of sound,
    or bytes of a picture. Options: width, 1 unless given, which multiplies channels."""

    batches: ClassVar[bool] = False

    def load(self, model: str | None, device: str, options: dict[str, Any]) -> None:
        torch.set_num_threads(1)
        torch.backends.cudnn.deterministic = True  # so that instances can be compared
        torch.manual_seed(SEED)  # the weights are drawn on the CPU: the same in every process
        width = int(options.get("width", 1))
        self._device = torch.device(device)
        self._voice = Voice(width).eval().to(self._device)
        self._picture = Picture(width).eval().to(self._device)
        self._makers: dict[object, Callable[[Job], bytes]] = {"voice": self._speak, "picture": self._paint}

    def warm_up(self) -> list[Job]:
        return [Job({"model": "voice", "seed": 0, "frames": 16}), Job({"model": "picture", "seed": 0})]

    @torch.inference_mode()
    def run(self, batch: list[Job]) -> list[Result | TonleError]:
        return [self._one(job) for job in batch]

    def _one(self, job: Job) -> Result | TonleError:
        began_s = time.perf_counter()
        make = self._makers.get(job.fields.get("model"))
        if make is None:
            return InvalidRequest("model must be voice or picture", param="model")
        data = make(job)  # on the CPU: the device has done its work
        return Result({"run_s": time.perf_counter() - began_s}, (data,))

    def _speak(self, job: Job) -> bytes:
        draws = np.random.default_rng(job.fields["seed"])
        frames = int(job.fields["frames"])
        letters = torch.from_numpy(draws.integers(0, 256, max(1, frames // 6))).to(self._device)
        sound = self._voice(letters, frames)
        loud = sound / sound.abs().max().clamp_min(1e-6)  # random weights speak softly
        return _bytes((loud * 32767).round().to(torch.int16))

    def _paint(self, job: Job) -> bytes:
        draws = np.random.default_rng(job.fields["seed"])
        noise = torch.from_numpy(draws.standard_normal((1, 4, SIDE, SIDE), np.float32)).to(self._device)
        return _bytes(((self._picture(noise) + 1) * 127.5).round().to(torch.uint8))


def _bytes(values: Tensor) -> bytes:
    return np.asarray(values.cpu()).tobytes()
