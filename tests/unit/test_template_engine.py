"""A template may say what its sandboxes run on."""

from __future__ import annotations

import msgspec
import pytest
from yards import TestYard

from forkyard.errors import UnsupportedError
from forkyard.requests import MakeTemplate, TemplateSpec


async def test_its_sandboxes_run_on_it_unless_they_say(fake_yard: TestYard) -> None:
    templates = fake_yard.yard.templates
    base = templates.get("base")
    for engine in ("fake", "qemu"):
        templates.put(msgspec.structs.replace(base, name=engine, engine=engine))
    assert (await fake_yard.create(template="fake")).engine == "fake"
    with pytest.raises(UnsupportedError, match="is not set up"):
        await fake_yard.create(template="qemu")
    assert (await fake_yard.create(template="qemu", engine="auto")).engine == "fake"
    told = {info.name: (info.engine, info.warm) for info in map(templates.info, templates.all())}
    assert told["qemu"] == ("qemu", False) and told["base"][0] is None
    for engine in ("fake", "qemu"):
        templates.remove(engine)


async def test_one_that_is_not_here_makes_no_template(fake_yard: TestYard) -> None:
    spec = TemplateSpec(name="new", image="localhost:1/none", engine="qemu")
    request = MakeTemplate(spec=spec, request_id=fake_yard.request_id())
    with pytest.raises(UnsupportedError, match="is not set up"):
        async for _ in fake_yard.yard.making.make(request, fake_yard.caller):
            pass
