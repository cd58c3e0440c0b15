"""Real processors, tiny models and toy data without any download: for tests, examples, and users' own tests.

Enter a family name (as transformers names its folders) and a seed; leave real transformers objects and real media
bytes. Nothing here is mocked and nothing reads the network. The rest of the package must not import this
room.

Files, in the order the data meets them:
    toy_media.py          seeded images, clips and sound as bytes; a folder of them and a meta file over it
    tokenizer.py          a small BPE tokenizer; chat templates in the manner of the published ones
    families.py           what each family's processor is made of
    processors.py         `build_processor(family)`
    models.py             `build_tiny_model(family, processor)`
    conformance/          does a trainer train on exactly what our own loop would have given it?
    torchvision_shim.py   lets torchvision be imported beside a CPU build of torch

Importing this room arranges for that shim (it acts only when torchvision is imported and would fail), and loads neither
torch nor transformers.
"""

from vlm_stream.testing import torchvision_shim
from vlm_stream.testing.models import MODEL_FAMILIES, build_tiny_model
from vlm_stream.testing.processors import FAMILIES, MORE_FAMILIES, build_processor
from vlm_stream.testing.toy_media import (
    make_grey_jpeg,
    make_jpeg,
    make_mp4,
    make_palette_png,
    make_png_with_alpha,
    make_toy_dataset,
    make_toy_image,
    make_wav,
)

torchvision_shim.install()
