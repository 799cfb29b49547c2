"""The configuration: where values come from, which one wins, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from tidegate.config import Config, Extract
from tidegate.config_sources import Loaded, Setting, load, settings, show
from tidegate.errors import ConfigError
from tidegate.log.files.segmented import SEGMENT_BYTES_MAX
from tidegate.log.memory import MEMORY_BYTES


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def toml(text: str) -> Path:
    path = Path("tidegate.toml")
    path.write_text(text)
    return path


def refusal(file: str = "", environ: dict[str, str] | None = None, **flags: int | str) -> ConfigError:
    if file:
        toml(file)
    with pytest.raises(ConfigError) as caught:
        load(None, environ or {}, {path.replace("__", "."): value for path, value in flags.items()})
    return caught.value


def loaded(file: str = "", environ: dict[str, str] | None = None) -> Loaded:
    if file:
        toml(file)
    return load(None, environ or {}, {})


def test_without_sources_every_value_is_the_default() -> None:
    result = loaded()
    assert result.config == Config()
    assert set(result.sources.values()) == {"default"}
    assert set(result.sources) == set(settings())


def test_every_default_is_within_its_own_bounds() -> None:
    for path, each in settings().items():
        if isinstance(each.default, int) and not isinstance(each.default, bool):
            assert load(None, {}, {path: each.default}), path


def test_every_setting_has_an_environment_variable_of_its_own() -> None:
    variables = [each.variable for each in settings().values()]
    assert len(set(variables)) == len(variables)


def test_every_setting_is_explained() -> None:
    assert all(each.doc for each in settings().values())


def test_a_flag_wins_over_the_environment_which_wins_over_the_file() -> None:
    toml("[listen]\nport = 1001\nhost = '0.0.0.0'\nconnections_max = 5\n")
    environ = {"TIDEGATE_LISTEN_PORT": "1002", "TIDEGATE_LISTEN_HOST": "::1"}
    result = load(None, environ, {"listen.port": 1003})
    listen = result.config.listen
    assert (listen.port, listen.host, listen.connections_max) == (1003, "::1", 5)
    assert result.sources["listen.port"] == "flag --port"
    assert result.sources["listen.host"] == "environment TIDEGATE_LISTEN_HOST"
    assert result.sources["listen.connections_max"] == "file tidegate.toml"
    assert result.sources["listen.connect_timeout_s"] == "default"


def test_a_named_file_is_read_instead_of_the_one_in_the_current_folder(tmp_path: Path) -> None:
    toml("[listen]\nport = 1001\n")
    other = tmp_path / "other.toml"
    other.write_text("[listen]\nport = 1002\n")
    assert load(other, {}, {}).config.listen.port == 1002


@pytest.mark.parametrize(
    ("written", "bytes_"),
    [
        ("64MiB", 64 << 20),
        ("2GB", 2 * 10**9),
        ("1 GiB", 1 << 30),
        ("700000kB", 700_000_000),
        ("1073741824B", 1 << 30),
    ],
)
def test_sizes_have_units(written: str, bytes_: int) -> None:
    assert loaded(f'[log]\nsegment_bytes = "{written}"\n').config.log.segment_bytes == bytes_
    environ = {"TIDEGATE_LOG_SEGMENT_BYTES": written}
    assert loaded(environ=environ).config.log.segment_bytes == bytes_


@pytest.mark.parametrize(("written", "seconds"), [("10s", 10), ("15m", 900), ("2h", 7200), ("7d", 604_800)])
def test_durations_have_units(written: str, seconds: int) -> None:
    assert loaded(f'[log]\nretention_s = "{written}"\n').config.log.retention_s == seconds


@pytest.mark.parametrize("path", ["log.tail_bytes", "mqtt.packet_bytes_max", "retained.bytes_max"])
def test_a_size_is_known_by_the_end_of_its_name(path: str) -> None:
    assert settings()[path].is_size


def test_a_number_of_things_has_no_unit() -> None:
    error = refusal(environ={"TIDEGATE_MQTT_RECEIVE_MAXIMUM": "1KiB"})
    assert "a whole number, from 1 to 65535" in error.message


@pytest.mark.parametrize(("written", "value"), [("true", True), ("on", True), ("0", False), ("No", False)])
def test_the_environment_writes_switches_as_words(written: str, value: bool) -> None:
    assert loaded(environ={"TIDEGATE_LOG_STORE_QOS0": written}).config.log.store_qos0 is value


def test_the_data_folder_is_a_path() -> None:
    assert loaded(environ={"TIDEGATE_DATA": "elsewhere"}).config.data == Path("elsewhere")


def test_an_unknown_key_is_refused_with_the_nearest_right_one() -> None:
    error = refusal("[log]\nsegment_byte = 1\n")
    assert error.path == "log.segment_byte"
    assert "file tidegate.toml" in error.message
    assert error.hint == "did you mean log.segment_bytes?"


def test_a_key_in_the_wrong_table_is_refused_with_its_place() -> None:
    assert refusal("port = 1883\n").hint == "did you mean listen.port?"


def test_an_unknown_table_is_refused() -> None:
    error = refusal("[lsten]\nport = 1\n")
    assert (error.path, error.hint) == ("lsten", "did you mean listen?")


def test_a_table_written_as_a_value_is_refused() -> None:
    assert "table" in refusal("log = 3\n").message


def test_an_unknown_variable_is_refused_with_the_nearest_right_one() -> None:
    error = refusal(environ={"TIDEGATE_LOG_DURABILTY": "os"})
    assert error.path == "TIDEGATE_LOG_DURABILTY"
    assert error.hint == "did you mean TIDEGATE_LOG_DURABILITY?"


def test_other_programs_variables_are_left_alone() -> None:
    assert loaded(environ={"PATH": "x", "TIDE": "y"}).config == Config()


@pytest.mark.parametrize(
    ("file", "path", "expected"),
    [
        ('[listen]\nport = "1883"\n', "listen.port", "a whole number, from 0 to 65535"),
        ("[listen]\nport = true\n", "listen.port", "a whole number"),
        ("[listen]\nport = 1.5\n", "listen.port", "a whole number"),
        ("[listen]\nhost = 7\n", "listen.host", "text"),
        ("[listen]\nhost = ''\n", "listen.host", "text"),
        ("data = 7\n", "data", "a path"),
        ('[log]\nstore_qos0 = "yes"\n', "log.store_qos0", "true or false"),
        ("[log]\nsegment_bytes = '64 elephants'\n", "log.segment_bytes", 'a size like "64MiB"'),
        ("[log]\nretention_s = '2 weeks'\n", "log.retention_s", 'a duration like "10s"'),
        ("[log]\ndurability = 1\n", "log.durability", "fsync or os or memory"),
        ("[listen]\nport = [1]\n", "listen.port", "a whole number"),
    ],
)
def test_a_wrong_type_is_refused_with_what_would_be_right(file: str, path: str, expected: str) -> None:
    error = refusal(file)
    assert error.path == path
    assert expected in error.message


@pytest.mark.parametrize(
    ("variable", "value", "bound"),
    [
        ("TIDEGATE_LISTEN_PORT", "65536", "from 0 to 65535"),
        ("TIDEGATE_LISTEN_PORT", "-1", "from 0 to 65535"),
        ("TIDEGATE_LOG_SEGMENT_BYTES", "1KiB", "from 64KiB to 2GiB"),
        ("TIDEGATE_LOG_SEGMENT_BYTES", "3GiB", "from 64KiB to 2GiB"),
        ("TIDEGATE_LOG_MEMORY_BYTES", "1KiB", "at least 1MiB"),
        ("TIDEGATE_MQTT_CLIENT_ID_BYTES_MAX", "22", "from 23 to 65535"),
        ("TIDEGATE_LISTEN_CONNECT_TIMEOUT_S", "2h", "from 1s to 1h"),
        ("TIDEGATE_MQTT_SESSIONS_MAX", "0", "at least 1"),
    ],
)
def test_a_value_out_of_bounds_is_refused_with_the_bounds(variable: str, value: str, bound: str) -> None:
    error = refusal(environ={variable: value})
    assert bound in error.message
    assert variable in error.message


def test_the_largest_segment_is_the_largest_that_the_log_can_write() -> None:
    assert settings()["log.segment_bytes"].high == SEGMENT_BYTES_MAX


def test_a_log_in_memory_has_a_size_fit_for_memory() -> None:
    assert Config().log.memory_bytes == MEMORY_BYTES


def test_events_are_text_unless_json_is_asked_for() -> None:
    assert loaded().config.log_format == "text"
    assert loaded("log_format = 'json'\n").config.log_format == "json"
    assert "text or json" in refusal("log_format = 'xml'\n").message


def test_client_ids_have_a_bound_that_users_may_move() -> None:
    assert loaded().config.mqtt.client_id_bytes_max == 1024
    assert loaded("[mqtt]\nclient_id_bytes_max = 65535\n").config.mqtt.client_id_bytes_max == 65535


def test_a_misspelt_choice_is_refused_with_the_nearest_right_one() -> None:
    assert refusal(log__durability="fsnyc").hint == "did you mean fsync?"


def test_a_flag_for_an_unknown_setting_is_refused() -> None:
    assert refusal(listen__prot=1).hint == "did you mean listen.port?"


def test_retention_below_one_segment_is_refused_with_the_reason() -> None:
    error = refusal("[log]\nretention_bytes = '64MiB'\n")
    assert error.path == "log.retention_bytes"
    assert "whole segments" in error.message


def test_a_hard_limit_below_retention_is_refused_with_the_reason() -> None:
    error = refusal("[log]\nretention_bytes = '100GiB'\n")
    assert error.path == "log.hard_bytes"
    assert "what sessions need" in error.message


def test_a_missing_file_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.toml: cannot be read: No such file"):
        load(Path("nowhere.toml"), {}, {})


def test_a_file_that_is_not_toml_is_refused_with_the_line() -> None:
    assert "line 2" in refusal("[log]\nsegment_bytes = \n").message


def test_a_file_that_is_not_text_is_refused() -> None:
    Path("tidegate.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="UTF-8"):
        load(None, {}, {})


@pytest.mark.parametrize(
    ("path", "value", "text"),
    [
        ("log.segment_bytes", 128 << 20, "128MiB"),
        ("log.segment_bytes", 1_000_001, "1000001"),
        ("log.retention_s", 5400, "90m"),
        ("mqtt.keep_alive_max_s", 0, "0"),
        ("listen.port", 3600, "3600"),
        ("log.store_qos0", True, "true"),
    ],
)
def test_values_are_shown_as_people_write_them(path: str, value: int, text: str) -> None:
    assert show(path, value) == text


def test_what_is_shown_can_be_read_back() -> None:
    for path, each in settings().items():
        assert isinstance(each, Setting)
        result = load(None, {each.variable: show(path, each.default)}, {})
        assert result.config == Config()


# ── tables whose keys the user chooses ──


def test_whatever_stands_below_spark_is_a_setting_of_spark() -> None:
    result = loaded(
        "[spark]\nmaster = 'spark://host:7077'\nspeculation = true\n'speculation.quantile' = 0.9\n"
        "[spark.executor]\nmemory = '2g'\ncores = 4\n"
    )
    assert result.config.spark == {
        "spark.master": "spark://host:7077",
        "spark.speculation": "true",
        "spark.speculation.quantile": "0.9",
        "spark.executor.memory": "2g",
        "spark.executor.cores": "4",
    }
    assert result.sources["spark.executor.memory"] == "file tidegate.toml"


def test_spark_runs_here_unless_told_otherwise() -> None:
    assert loaded().config.spark == {"spark.master": "local[*]"}
    environ = {"TIDEGATE_SPARK_MASTER": "yarn"}
    assert loaded(environ=environ).config.spark == {"spark.master": "yarn"}


def test_a_setting_of_spark_may_be_empty() -> None:
    assert loaded("[spark.driver]\nextraJavaOptions = ''\n").config.spark["spark.driver.extraJavaOptions"] == ""


def test_a_flag_sets_any_setting_of_spark() -> None:
    toml("[spark]\nmaster = 'local[1]'\nexecutor.memory = '1g'\n")
    result = load(None, {}, {"spark.master": "local[2]", "spark.sql.ansi.enabled": "false"})
    assert result.config.spark == {
        "spark.master": "local[2]",
        "spark.executor.memory": "1g",
        "spark.sql.ansi.enabled": "false",
    }
    assert result.sources["spark.master"] == "flag --conf"


@pytest.mark.parametrize(
    "master", ["local", "local[4]", "local[*]", "local[2, 3]", "k8s://https://host:6443", "spark://a:1,b:2"]
)
def test_the_places_where_spark_runs_are_accepted(master: str) -> None:
    assert loaded(f"[spark]\nmaster = '{master}'\n").config.spark["spark.master"] == master


def test_each_tenant_may_have_its_own_retention() -> None:
    result = loaded("[pipeline.tenant_retention_s]\nacme = '30d'\n'big.corp' = 60\n")
    assert result.config.pipeline.tenant_retention_s == {"acme": 30 * 86_400, "big.corp": 60}
    assert result.sources["pipeline.tenant_retention_s.acme"] == "file tidegate.toml"


def test_extractions_have_a_name_a_filter_and_columns() -> None:
    columns = "value double, tags array<string>, at map<string, struct<x: int, y: int>>, `odd name` decimal(10, 2)"
    result = loaded(f"[extract.climate]\nfilter = 'sensors/+/climate/#'\ncolumns = '{columns}'\n")
    assert result.config.extract == {"climate": Extract("sensors/+/climate/#", columns)}


EXTRACT = "[extract.climate]\nfilter = 'a/#'\ncolumns = 'value double'\n"


@pytest.mark.parametrize(
    ("file", "path", "words"),
    [
        ("[spark]\nmaster = 'loca[*]'\n", "spark.master", "local[*], local[N], spark://HOST:PORT"),
        ("[spark]\nmaster = ''\n", "spark.master", "no place where Spark runs"),
        ("[spark]\njars = ['a', 'b']\n", "spark.jars", "text"),
        ("[spark]\n'spark.executor.memory' = '1g'\n", "spark.spark.executor.memory", 'write "executor.memory"'),
        ("spark = 'local'\n", "spark", "[spark]"),
        ("[pipeline.tenant_retention_s]\nacme = 'long'\n", "pipeline.tenant_retention_s.acme", '"7d"'),
        ("[pipeline.tenant_retention_s]\nacme = 0\n", "pipeline.tenant_retention_s.acme", "at least 1s"),
        ("[pipeline]\ntenant_retention_s = 5\n", "pipeline.tenant_retention_s", "a table"),
        ("[pipeline]\nlake_retention = 5\n", "pipeline.lake_retention", "pipeline.lake_retention_s"),
        ("extract = 5\n", "extract", "[extract]"),
        ("[extract]\nclimate = 5\n", "extract.climate", "[extract.climate]"),
        ("[extract.'a b']\nfilter = 'a'\n", "extract.a b", "letters"),
        ("[extract.climate]\nfilter = 'a'\n", "extract.climate.columns", "is missing"),
        ("[extract.climate]\ncolumns = 'a int'\n", "extract.climate.filter", "is missing"),
        (EXTRACT + "colums = 'a int'\n", "extract.climate.colums", "extract.climate.columns"),
        (EXTRACT.replace("a/#", "a/#/b"), "extract.climate.filter", "`#` must be the last level"),
        (EXTRACT.replace("a/#", ""), "extract.climate.filter", "text"),
        (EXTRACT.replace("value double", "value duble"), "extract.climate.columns", '"value duble"'),
        (EXTRACT.replace("value double", "value"), "extract.climate.columns", '"value"'),
        (EXTRACT.replace("value double", "a int,"), "extract.climate.columns", '""'),
        (EXTRACT.replace("value double", "a array<int"), "extract.climate.columns", '"a array<int"'),
    ],
)
def test_a_wrong_entry_is_refused_with_its_place_and_what_would_be_right(file: str, path: str, words: str) -> None:
    error = refusal(file)
    assert error.path == path
    assert words in f"{error.message} {error.hint}"


def test_the_lake_lies_in_the_data_folder_unless_told_otherwise() -> None:
    assert loaded(environ={"TIDEGATE_DATA": "here"}).config.lake_folder == Path("here/lake")
    assert loaded("[pipeline]\nlake = '/big/lake'\n").config.lake_folder == Path("/big/lake")


def test_the_configuration_never_prints_what_is_meant_for_spark_alone() -> None:
    config = loaded("[spark.hadoop.fs.s3a]\n'secret.key' = 'hush'\n").config
    assert config.spark["spark.hadoop.fs.s3a.secret.key"] == "hush"
    assert "hush" not in repr(config)
