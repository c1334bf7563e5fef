"""Images decode the same from a folder and an archive; broken ones are refused by name."""

import io
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fairhead.data.files import Skips, Source
from fairhead.data.images import HeldImages, Images
from fairhead.errors import InputError


def _noise(rng: np.random.Generator, height: int, width: int) -> Image.Image:
    return Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))


def _bytes(image: Image.Image, kind: str) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind)
    return buffer.getvalue()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    for i in range(300):
        (tmp_path / f"{i:03}.jpg").write_bytes(_bytes(_noise(rng, 9, 7), "JPEG"))
    return tmp_path


@pytest.fixture
def images(folder: Path) -> Images:
    source = Source(folder)
    return Images(source, source.names)


def test_arrays_are_what_pillow_gives(folder, images):
    expected = np.stack([np.asarray(Image.open(folder / f"{i:03}.jpg")) for i in range(300)])
    np.testing.assert_array_equal(images.as_array(size=None), expected)
    np.testing.assert_array_equal(images.as_array(size=None, indices=[5, 2, 5], workers=3), expected[[5, 2, 5]])
    small = [np.asarray(Image.open(folder / f"{i:03}.jpg").resize((4, 4), Image.Resampling.BILINEAR)) for i in (7, 8)]
    np.testing.assert_array_equal(images.take([7, 8]).as_array(size=4), small)
    np.testing.assert_array_equal(np.asarray(images[-1]), expected[-1])


def test_an_archive_decodes_as_its_folder_does(folder, images, tmp_path_factory):
    path = tmp_path_factory.mktemp("zip") / "images.zip"
    with zipfile.ZipFile(path, "w") as z:
        for name in Source(folder).names:
            z.write(folder / name, f"deep/{name}")
    source = Source(path)
    np.testing.assert_array_equal(Images(source, source.names).as_array(8), images.as_array(8))


def test_progress_counts_to_the_end(images):
    seen: list[tuple[int, int]] = []
    images.as_array(4, progress=lambda done, total: seen.append((done, total)))
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    assert seen[-1] == (300, 300)


def test_grey_palette_and_transparent_images_become_rgb(tmp_path):
    grey = Image.fromarray(np.arange(16, dtype=np.uint8).reshape(4, 4))
    for mode in ("L", "P", "RGBA"):
        grey.convert(mode).save(tmp_path / f"{mode}.png")
    source = Source(tmp_path)
    array = Images(source, source.names).as_array(None)
    np.testing.assert_array_equal(array, np.repeat(np.asarray(grey)[None, :, :, None], 3, 0).repeat(3, 3))


def test_no_images_are_an_empty_array(images):
    assert images.take([]).as_array(8).shape == (0, 8, 8, 3)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is not an image"),
        (b"<html>404</html>", "is not an image"),
        (_bytes(Image.effect_noise((64, 64), 90).convert("RGB"), "JPEG")[:600], "damaged image"),
        (_bytes(Image.effect_noise((64, 64), 90).convert("RGB"), "PNG")[:600], "damaged image"),
    ],
    ids=["empty", "html", "truncated jpeg", "truncated png"],
)
def test_a_broken_image_is_named(folder, data, message):
    (folder / "150.jpg").write_bytes(data)
    source = Source(folder)
    images = Images(source, source.names)
    with pytest.raises(InputError, match=rf"^{folder}/150\.jpg: .*{message}.*or go on without it \(.*on_error=skip"):
        images[150]
    with pytest.raises(InputError, match=r"150\.jpg"):
        images.as_array(4)
    assert images.decodable(Skips()).tolist() == list(range(len(images)))
    skips = Skips("skip")
    assert images.decodable(skips).tolist() == [i for i in range(len(images)) if i != 150]
    assert skips.found() == {"not a readable image": ("150.jpg",)}


@pytest.mark.parametrize("limit", [62, 10])  # Pillow warns above its limit and refuses above twice the limit
@pytest.mark.filterwarnings("default::PIL.Image.DecompressionBombWarning")
def test_more_pixels_than_pillow_allows_are_refused(images, monkeypatch, limit, recwarn):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)  # an image has 63 pixels
    with pytest.raises(InputError, match=r"000\.jpg: too large to decode safely"):
        images[0]


def test_different_sizes_need_a_size(folder, images):
    Image.new("RGB", (5, 5)).save(folder / "010.jpg")
    with pytest.raises(InputError, match=r"010\.jpg: is 5 × 5 pixels where others are 7 × 9"):
        images.as_array(None)
    assert images.as_array(6).shape == (300, 6, 6, 3)


def test_a_photograph_is_turned_as_its_camera_says(tmp_path):
    across = np.zeros((10, 20, 3), np.uint8)
    across[:, 10:] = 255
    exif = Image.Exif()
    exif[0x0112] = 6  # turn it by a quarter, clockwise
    Image.fromarray(across).save(tmp_path / "a.jpg", exif=exif, quality=95)
    found = Images(Source(tmp_path), ["a.jpg"])[0]
    assert found.size == (10, 20)
    assert np.asarray(found)[2].mean() < 20 < 230 < np.asarray(found)[17].mean()
    held = HeldImages([Image.open(tmp_path / "a.jpg")])[0]
    assert np.array_equal(np.asarray(held), np.asarray(found))


@pytest.mark.parametrize("name", ["a.png", "a.tiff"])
def test_pictures_of_16_bits_keep_their_greys(tmp_path, name):
    grey = np.arange(256, dtype=np.uint8).reshape(16, 16)
    deep = Image.fromarray(grey.astype(np.uint16) * 257)
    deep.save(tmp_path / name)
    for found in (Images(Source(tmp_path), [name])[0], HeldImages([deep])[0]):
        assert np.array_equal(np.asarray(found)[..., 0], grey)


@pytest.mark.parametrize("dtype", [np.float32, np.int32])
def test_pictures_whose_range_is_not_known_are_refused(tmp_path, dtype):
    pixels = np.linspace(0, 1, 256, dtype=np.float32).reshape(16, 16).astype(dtype)
    Image.fromarray(pixels).save(tmp_path / "a.tiff")
    for images in (Images(Source(tmp_path), ["a.tiff"]), HeldImages([pixels])):
        with pytest.raises(InputError, match="whose black and white are not known; expected 8 or 16 bits"):
            images[0]


def test_features_are_found_by_file_name_only_where_no_two_pictures_share_one(tmp_path):
    table = {"0.png": 0, "1.png": 1}
    assert Images(Source(tmp_path), ["a/0.png", "a/1.png"]).positions(table) == [0, 1]
    assert Images(Source(tmp_path), ["a/0.png", "b/0.png"]).positions(table) == [-1, -1]
