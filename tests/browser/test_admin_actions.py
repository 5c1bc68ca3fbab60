"""What an admin does on the page, and that a key that may only read can do none of it. Who is signed in, and until when."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import httpx
import pytest

from tests.browser.house import House, bearer
from tests.browser.signed_in import asked, go_to, opened, sign_in, signed_in

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

BACKEND = "replica-a"
EXPERIMENT = "same-model"
READ_ONLY = "This key may only read."


@pytest.fixture(scope="module")
def admin(browser: Browser, house: House) -> Iterator[Page]:
    with signed_in(browser, house.url, house.admin_key, "backends") as page:
        yield page


@pytest.fixture(scope="module")
def reader(browser: Browser, house: House) -> Iterator[Page]:
    with signed_in(browser, house.url, house.reader_key, "backends") as page:
        yield page


def is_draining(house: House) -> bool:
    (backend,) = house.told("admin/backends")["backends"]
    return bool(backend["draining"])


def is_running(house: House) -> bool:
    (experiment,) = house.told("admin/experiments")["experiments"]
    return bool(experiment["running"])


def key_names(house: House) -> list[str]:
    return [key["name"] for key in house.told("admin/keys")["keys"] if not key["revoked"]]


def models(house: House) -> list[str]:
    return [model["id"] for model in house.told("v1/models")["data"]]


def test_a_backend_is_drained_and_resumed(admin: Page, house: House) -> None:
    go_to(admin, "backends")
    row = admin.get_by_test_id("backends").locator("tbody tr", has_text=BACKEND)
    row.get_by_text("available", exact=True).wait_for()
    admin.get_by_test_id(f"drain-{BACKEND}").click()
    assert not is_draining(house)  # it asks first
    admin.get_by_test_id(f"drain-{BACKEND}-confirm").click()
    row.get_by_text("drained", exact=True).wait_for()
    assert is_draining(house)
    assert house.ask("Hello", max_tokens=2).status_code == 503
    admin.get_by_test_id(f"resume-{BACKEND}").click()
    row.get_by_text("available", exact=True).wait_for()
    assert house.ask("Hello", max_tokens=2).status_code == 200


def test_a_key_is_created_and_revoked(admin: Page, house: House) -> None:
    go_to(admin, "keys")
    admin.get_by_test_id("create-key").locator("summary").click()
    admin.get_by_test_id("key-name").fill("night batch")
    admin.get_by_test_id("key-create").click()
    secret = admin.get_by_test_id("key-secret").inner_text()
    asks = {"headers": bearer(secret), "timeout": 30}
    assert httpx.get(f"{house.url}/v1/models", **asks).status_code == 200
    row = admin.get_by_test_id("keys").locator("tbody tr", has_text="night batch")
    row.get_by_role("button", name="Revoke night batch").click()
    row.get_by_role("button", name="Yes").click()
    row.wait_for(state="detached")
    assert httpx.get(f"{house.url}/v1/models", **asks).status_code == 401
    assert "night batch" not in key_names(house)


def test_an_adapter_is_loaded_used_and_removed(admin: Page, house: House) -> None:
    go_to(admin, "models")
    admin.get_by_test_id("lora-name").fill("delta")
    admin.get_by_test_id("lora-path").fill(str(house.folder / "no-such-folder"))
    admin.get_by_label("Model it is for").select_option(house.model)
    admin.get_by_test_id("lora-load").click()
    admin.locator(".message.bad", has_text="no-such-folder").wait_for()
    admin.get_by_test_id("lora-path").fill(str(house.adapter("delta-adapter")))
    admin.get_by_test_id("lora-load").click()
    row = admin.get_by_test_id("models").locator("tbody tr", has_text="delta")
    row.get_by_text(f"of {house.model}").wait_for()
    assert house.ask("Hello", model="delta", max_tokens=2).headers["x-tonle-adapter"].startswith("delta@")
    admin.get_by_test_id("unload-delta").click()
    admin.get_by_test_id("unload-delta-confirm").click()
    row.wait_for(state="detached")
    assert "delta" not in models(house)


def test_an_experiment_is_stopped_and_started(admin: Page, house: House) -> None:
    go_to(admin, "experiments")
    experiment = admin.get_by_test_id("experiment")
    experiment.get_by_test_id("stop-experiment").click()
    experiment.get_by_test_id("stop-experiment-confirm").click()
    experiment.get_by_text("stopped", exact=True).wait_for()
    assert not is_running(house)
    experiment.get_by_test_id("start-experiment").click()
    experiment.get_by_test_id("start-experiment-confirm").click()
    experiment.get_by_text("running", exact=True).wait_for()
    assert is_running(house)


def test_a_reader_sees_what_it_may_not_do_and_why(reader: Page) -> None:
    go_to(reader, "backends")
    assert reader.get_by_test_id(f"drain-{BACKEND}").is_disabled()
    assert READ_ONLY in reader.get_by_test_id("read-only").inner_text()
    go_to(reader, "experiments")
    stop = reader.get_by_test_id("stop-experiment")
    stop.wait_for()
    assert stop.is_disabled()
    assert READ_ONLY in (stop.locator("xpath=..").get_attribute("title") or "")
    go_to(reader, "models")
    assert reader.get_by_test_id("lora-load").is_disabled()
    assert READ_ONLY in reader.get_by_test_id("load-adapter").inner_text()
    go_to(reader, "keys")
    assert READ_ONLY in reader.get_by_test_id("read-only").inner_text()
    assert reader.get_by_test_id("create-key").count() == 0
    revoke = reader.get_by_role("button", name="Revoke user")
    revoke.wait_for()
    assert revoke.is_disabled()


def test_a_reader_is_refused_whatever_its_page_asks(reader: Page, house: House) -> None:
    before = key_names(house)
    (key,) = [key["id"] for key in house.told("admin/keys")["keys"] if key["name"] == "user"]
    for method, path, body in (
        ("POST", f"/admin/backends/{BACKEND}/drain", None),
        ("POST", f"/admin/experiments/{EXPERIMENT}/stop", None),
        ("POST", "/admin/keys", {"name": "mine", "scopes": ["admin"]}),
        ("DELETE", f"/admin/keys/{key}", None),
        ("POST", "/v1/load_lora_adapter", {"lora_name": "mine", "lora_path": str(house.adapter("delta-adapter"))}),
        ("POST", "/v1/chat/completions", {"model": house.model, "messages": [{"role": "user", "content": "Hi"}]}),
    ):
        assert asked(reader, method, path, body) == 403, path
    assert asked(reader, "GET", "/dashboard/api/requests") == 200  # it does have a session
    assert not is_draining(house)
    assert is_running(house)
    assert key_names(house) == before
    assert "mine" not in models(house)


def test_a_wrong_key_is_refused_and_a_right_one_signs_in_until_it_signs_out(browser: Browser, house: House) -> None:
    with opened(browser, house.url) as page:
        sign_in(page, "tonle-not-a-key")
        page.get_by_test_id("login-error").get_by_text("unknown or was revoked").wait_for()
        sign_in(page, house.user_key)
        page.get_by_test_id("login-error").get_by_text("scope dashboard or admin").wait_for()
        sign_in(page, house.reader_key)
        page.get_by_test_id("page-overview").wait_for()
        (cookie,) = page.context.cookies()
        assert (cookie["httpOnly"], cookie["sameSite"]) == (True, "Strict")
        assert page.evaluate("document.cookie + JSON.stringify({...localStorage})").find(house.reader_key) < 0
        page.reload()
        page.get_by_test_id("page-overview").wait_for()
        with page.context.new_page() as other:
            other.goto(page.url)
            other.get_by_test_id("connection").get_by_text("Live").wait_for()
            page.get_by_test_id("logout").click()
            page.get_by_test_id("login-key").wait_for()
            other.get_by_test_id("login-ended").get_by_text("in another tab").wait_for()
            assert page.get_by_test_id("login-ended").count() == 0
        assert asked(page, "GET", "/dashboard/api/requests") == 401
        kept = {"cookie": f"tonle_session={cookie['value']}", "sec-fetch-site": "same-origin"}
        assert httpx.get(f"{house.url}/dashboard/api/requests", headers=kept, timeout=30).status_code == 401


def test_a_session_ends_with_its_key(browser: Browser, house: House) -> None:
    key_id, secret = house.make_key("wall screen", "dashboard")
    with signed_in(browser, house.url, secret) as page:
        page.get_by_test_id("connection").get_by_text("Live").wait_for()
        house.revoke(key_id)
        page.get_by_test_id("login-key").wait_for()  # without a click: the stream of figures ended
        page.get_by_test_id("login-ended").get_by_text("the key you used was revoked").wait_for()
        sign_in(page, secret)
        page.get_by_test_id("login-error").get_by_text("unknown or was revoked").wait_for()


def test_a_server_without_keys_on_this_machine_needs_no_login(browser: Browser, house: House) -> None:
    with opened(browser, house.backend_url, "models") as page:
        page.get_by_test_id("models").get_by_text(house.model).first.wait_for()
        assert page.get_by_test_id("logout").count() == 0
        page.get_by_test_id("lora-name").fill("alone")
        page.get_by_test_id("lora-path").fill(str(house.adapter("delta-adapter")))
        page.get_by_test_id("lora-load").click()  # --enable-lora: every caller may
        page.get_by_test_id("unload-alone").click()
        page.get_by_test_id("unload-alone-confirm").click()
        page.get_by_test_id("unload-alone").wait_for(state="detached")
        go_to(page, "keys")
        page.get_by_test_id("no-key-store").wait_for()
        go_to(page, "overview")
        page.get_by_test_id("kv-usage").wait_for()
