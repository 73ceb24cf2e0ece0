//! One planted defect a test: each way a dataset can be broken has its own code, place and exit.

mod planted;
mod recipes;

use lbva_tui::config::{DataConfig, ModelConfig, RobotLayout};
use lbva_tui::data::columns::ColumnFile;
use lbva_tui::data::video::VideoFile;
use lbva_tui::data::{ClipId, Dataset};
use lbva_tui::{Error, Exit};
use parquet::data_type::Int64Type;
use parquet::file::properties::WriterProperties;
use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::parser::parse_message_type;
use planted::{Broken, LFS, PARQUET, TOKENS, VIDEO, faststart, find_box, one_line, parquet, parquet_at, replace_bytes};
use std::sync::Arc;

#[track_caller]
fn expect(error: &Error, exit: Exit, code: &str, place: &str) {
    assert_eq!((error.exit, error.code), (exit, code), "{error}");
    assert!(error.place.contains(place), "{} does not name {place}", error.place);
}

/// A run of one value takes a few bytes whatever its length: who believes the length fills the memory.
#[test]
fn a_parquet_file_that_promises_billions_of_values_is_refused_before_room_is_made() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run.parquet");
    let rows = 1_100_000;
    let schema = Arc::new(parse_message_type("message schema { REQUIRED INT64 task_index; }").unwrap());
    let settings = WriterProperties::builder().set_data_page_row_count_limit(2 * rows).build();
    let file = std::fs::File::create(&path).unwrap();
    let mut writer = SerializedFileWriter::new(file, schema, Arc::new(settings)).unwrap();
    let mut group = writer.next_row_group().unwrap();
    let mut column = group.next_column().unwrap().unwrap();
    column.typed::<Int64Type>().write_batch(&vec![1; rows], None, None).unwrap();
    column.close().unwrap();
    group.close().unwrap();
    writer.close().unwrap();
    assert_eq!(ColumnFile::open(&path).unwrap().read("task_index").unwrap().values.len(), rows);

    // Counts and run lengths are twice the number, in sevens of bits from the lowest on.
    let varint =
        |number: usize| [0, 7, 14, 21].map(|at| ((2 * number) >> at) as u8 & 0x7f | if at < 21 { 0x80 } else { 0 });
    let bytes = std::fs::read(&path).unwrap();
    assert!(bytes.len() < 1000, "{}", bytes.len());
    std::fs::write(&path, replace_bytes(&bytes, &varint(rows), &varint(130_000_000))).unwrap();
    let error = one_line(ColumnFile::open(&path).unwrap().read("task_index").unwrap_err());
    expect(&error, Exit::BadData, "not_openable", "run.parquet");
    assert!(error.what.contains("130000000 values"), "{error}");
}

/// Offsets and sizes of the footer are signed.
#[test]
fn a_parquet_footer_that_points_outside_of_its_file_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("rows.parquet");
    parquet(&path, 3000, 16, 7, None);
    let bytes = std::fs::read(&path).unwrap();
    let reader = SerializedFileReader::new(std::fs::File::open(&path).unwrap()).unwrap();
    let chunk = reader.metadata().row_group(0).column(1).clone();
    let start = chunk.dictionary_page_offset().unwrap();
    for (number, wrong) in [
        (start, -start),
        (start, bytes.len() as i64),
        (chunk.compressed_size(), -chunk.compressed_size()),
        (chunk.compressed_size(), bytes.len() as i64),
    ] {
        // Zigzag, in sevens of bits; all of these numbers take three bytes.
        let varint = |number: i64| {
            let zigzag = ((number << 1) ^ (number >> 63)) as u64;
            assert!((1 << 14..1 << 21).contains(&zigzag), "{number}");
            [zigzag as u8 & 0x7f | 0x80, (zigzag >> 7) as u8 & 0x7f | 0x80, (zigzag >> 14) as u8]
        };
        std::fs::write(&path, replace_bytes(&bytes, &varint(number), &varint(wrong))).unwrap();
        let read = ColumnFile::open(&path).and_then(|file| file.read("action"));
        let error = one_line(read.map(drop).unwrap_err());
        expect(&error, Exit::BadData, "not_openable", "rows.parquet");
        assert!(error.what.contains("outside of the file"), "{number} {wrong}: {error}");
    }
}

#[test]
fn metadata_defects() {
    let mut broken = Broken::new();
    broken.config.dataset = broken.path("nowhere");
    expect(&broken.open_error(), Exit::BadData, "dataset_missing", "nowhere");

    for part in ["meta/info.json", "meta/episodes.jsonl", "meta/tasks.jsonl"] {
        let broken = Broken::new();
        broken.write(part, LFS);
        let error = broken.open_error();
        expect(&error, Exit::BadData, "lfs_pointer", part);
        assert!(error.hint.contains("git lfs pull"), "{error}");
        broken.write(part, [0xff, 0xfe, 0x00]);
        expect(&broken.open_error(), Exit::BadData, "not_openable", part);
        std::fs::remove_file(broken.path(part)).unwrap();
        expect(&broken.open_error(), Exit::BadData, "file_missing", part);
    }

    let broken = Broken::new();
    broken.replace("meta/info.json", "\"v2.1\"", "\"v3.0\"");
    let error = broken.open_error();
    expect(&error, Exit::BadData, "unknown_version", "info.json");
    assert!(error.what.contains("v3.0"));

    let broken = Broken::new();
    broken.replace("meta/info.json", "\"fps\": 20,", "\"fps\": twenty,");
    let error = broken.open_error();
    expect(&error, Exit::BadData, "broken_json", "info.json");
    assert!(error.what.contains("line 10"), "{error}");

    let broken = Broken::new();
    broken.replace("meta/episodes.jsonl", "{\"episode_index\": 2", "{\"episode_index\": ");
    let error = broken.open_error();
    expect(&error, Exit::BadData, "broken_json", "episodes.jsonl");
    assert!(error.what.contains("line 3"), "{error}");

    for (part, from, to) in [
        ("meta/info.json", "\"fps\": 20", "\"fps\": 0"),
        ("meta/info.json", "\"chunks_size\": 1000", "\"chunks_size\": 0"),
        ("meta/info.json", "{episode_index:06d}", "{file_index:06d}"),
        ("meta/episodes.jsonl", "\"episode_index\": 2", "\"episode_index\": 1"),
    ] {
        let broken = Broken::new();
        broken.replace(part, from, to);
        expect(&broken.open_error(), Exit::BadData, "broken_metadata", part);
    }
    let broken = Broken::new();
    broken.write("meta/episodes.jsonl", "\n");
    expect(&broken.open_error(), Exit::BadData, "broken_metadata", "episodes.jsonl");

    let broken = Broken::new();
    broken.replace("meta/tasks.jsonl", "\"task_index\": 2", "\"task_index\": 9");
    expect(&broken.open_error(), Exit::BadData, "unknown_task", "tasks.jsonl");
}

#[test]
fn parquet_defects() {
    let broken = Broken::new();
    let whole = broken.read(PARQUET);
    broken.write(PARQUET, LFS);
    expect(&broken.open_error(), Exit::BadData, "lfs_pointer", PARQUET);
    for bytes in [&b""[..], b"not parquet at all", &whole[..whole.len() / 2], &whole[..whole.len() - 3]] {
        broken.write(PARQUET, bytes);
        expect(&broken.open_error(), Exit::BadData, "not_openable", PARQUET);
    }
    std::fs::remove_file(broken.path(PARQUET)).unwrap();
    expect(&broken.open_error(), Exit::BadData, "file_missing", PARQUET);

    let broken = Broken::new();
    std::fs::copy(broken.path("data/chunk-000/episode_000000.parquet"), broken.path(PARQUET)).unwrap();
    let error = broken.open_error();
    expect(&error, Exit::BadData, "wrong_row_count", PARQUET);
    assert!(error.what.contains("71") && error.what.contains("134"), "{error}");

    let broken = Broken::new();
    parquet(&broken.path(PARQUET), 134, 16, 7, None);
    Dataset::open(&broken.config, &broken.model).expect("f64 columns without arrow's schema are read");

    // Row 5, column 2 of the action.
    for value in [f64::NAN, f64::INFINITY, 1e300, 1e31] {
        parquet(&broken.path(PARQUET), 134, 16, 7, Some((37, value)));
        let error = broken.open_error();
        expect(&error, Exit::BadData, "action_nonfinite", PARQUET);
        assert!(error.what.contains("action[2]") && error.what.contains("row 5"), "{error}");
    }
    for (state, action) in [(13, 7), (15, 7), (16, 6)] {
        parquet(&broken.path(PARQUET), 134, state, action, None);
        expect(&broken.open_error(), Exit::Refused, "column_out_of_range", PARQUET);
    }
    let mut broken = Broken::new();
    for change in [
        (|robot, column| robot.state_gripper = vec![column]) as fn(&mut RobotLayout, usize),
        |robot, column| robot.state_position = column,
        |robot, column| robot.state_quaternion_xyzw = column,
        |robot, column| robot.action = column,
    ] {
        let sound = broken.config.clone();
        change(&mut broken.config.robot, usize::MAX);
        expect(&broken.open_error(), Exit::Refused, "column_out_of_range", "episode_000000.parquet");
        broken.config = sound;
    }

    let broken = Broken::new();
    let renamed: Vec<u8> = replace_bytes(&broken.read(PARQUET), b"observation.state", b"observation.stale");
    broken.write(PARQUET, renamed);
    let error = broken.open_error();
    expect(&error, Exit::BadData, "pose_missing", PARQUET);
    assert!(error.what.contains("observation.state") && error.hint.contains("action"), "{error}");
}

/// At 20 fps a row is 50 ms; half of that is the limit.
#[test]
fn rows_out_of_time() {
    let broken = Broken::new();
    let times = |late: f64| -> Vec<f64> {
        (0..134).map(|row| 7.0 + f64::from(row) / 20.0 + if row < 40 { 0.0 } else { late }).collect()
    };
    for late in [0.0, 0.024, -0.024] {
        parquet_at(&broken.path(PARQUET), &times(late), 16, 7, None);
        Dataset::open(&broken.config, &broken.model).expect("a little jitter is no gap");
    }
    for late in [0.026, -0.026, 0.05, f64::NAN] {
        parquet_at(&broken.path(PARQUET), &times(late), 16, 7, None);
        let error = broken.open_error();
        expect(&error, Exit::BadData, "timestamp_gap", PARQUET);
        assert!(error.what.contains("in row 40"), "{error}");
    }
}

/// Both clocks of the file run at half their rate: 10 fps.
#[test]
fn a_video_out_of_time() {
    let broken = Broken::new();
    let mut slow = broken.read(VIDEO);
    for clock in [b"mvhd", b"mdhd"] {
        let at = find_box(&slow, clock) + 20;
        let rate = u32::from_be_bytes(slow[at..at + 4].try_into().unwrap());
        slow[at..at + 4].copy_from_slice(&(rate / 2).to_be_bytes());
    }
    broken.write(VIDEO, slow);
    let error = broken.load_error(2, 0);
    expect(&error, Exit::BadData, "wrong_fps", VIDEO);
    assert!(error.what.contains("frame 1 is shown at 0.100 s, at 20 fps it is 0.050 s"), "{error}");
}

#[test]
fn a_video_that_cannot_be_opened() {
    let broken = Broken::new();
    let whole = broken.read(VIDEO);
    let text = b"this is a text file, not a video";
    let png = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR";
    for bytes in [&b""[..], b"\0", text, png, &whole[..whole.len() / 2], &whole[..20]] {
        broken.write(VIDEO, bytes);
        expect(&broken.load_error(2, 0), Exit::BadData, "not_openable", VIDEO);
    }
    broken.write(VIDEO, LFS);
    let error = broken.load_error(2, 0);
    expect(&error, Exit::BadData, "lfs_pointer", VIDEO);
    assert!(error.hint.contains("git lfs pull"));
    std::fs::remove_file(broken.path(VIDEO)).unwrap();
    expect(&broken.load_error(2, 0), Exit::BadData, "file_missing", VIDEO);
    std::fs::create_dir(broken.path(VIDEO)).unwrap();
    expect(&broken.load_error(2, 0), Exit::BadData, "not_openable", VIDEO);
}

#[test]
fn a_video_of_another_codec() {
    let broken = Broken::new();
    let whole = broken.read(VIDEO);
    for (kind, codec) in [(b"hvc1", "HEVC"), (b"av01", "AV1"), (b"mjpg", "mjpg")] {
        broken.write(VIDEO, replace_bytes(&whole, b"avc1", kind));
        let error = broken.load_error(2, 0);
        expect(&error, Exit::BadData, "wrong_codec", VIDEO);
        assert!(error.what.contains(codec), "{error}");
    }
}

#[test]
fn a_video_that_is_too_short() {
    let broken = Broken::new();
    std::fs::copy(broken.path(&VIDEO.replace("000002", "000000")), broken.path(VIDEO)).unwrap();
    let error = broken.load_error(2, 48);
    expect(&error, Exit::BadData, "too_short", VIDEO);
    assert!(error.what.contains("71 frames") && error.what.contains("134"), "{error}");
    // A window that fits is refused too: the file is not this episode's.
    expect(&broken.load_error(2, 32), Exit::BadData, "too_short", VIDEO);
    let probed = Dataset::open(&broken.config, &broken.model).unwrap().probe();
    assert_eq!(probed.iter().map(|error| error.code).collect::<Vec<_>>(), ["too_short"], "check finds it undecoded");
}

#[test]
fn a_video_of_a_longer_episode() {
    let broken = Broken::new();
    std::fs::copy(broken.path(VIDEO), broken.path(&VIDEO.replace("000002", "000000"))).unwrap();
    expect(&broken.load_error(0, 0), Exit::BadData, "too_long", &VIDEO.replace("000002", "000000"));
}

#[test]
fn a_video_that_cannot_be_decoded() {
    let broken = Broken::new();
    let whole = broken.read(VIDEO);
    // From the middle of the coded pictures on, nothing is H.264 any more.
    let mut garbage = whole.clone();
    let (from, to) = (find_box(&whole, b"moov") / 2, find_box(&whole, b"moov"));
    for (at, byte) in garbage[from..to].iter_mut().enumerate() {
        *byte = (at * 151 % 251) as u8;
    }
    broken.write(VIDEO, &garbage);
    let dataset = Dataset::open(&broken.config, &broken.model).unwrap();
    dataset.load(&ClipId { episode: 2, start: 0 }).expect("a window before the damage still loads");
    let error = broken.load_error(2, 96);
    expect(&error, Exit::BadData, "decode_failed", VIDEO);
    assert!(error.what.contains("frame "), "{error}");

    // Cut off with the index in front: the container promises frames that are not there.
    let front = faststart(&whole);
    broken.write(VIDEO, &front);
    let intact = dataset.load(&ClipId { episode: 2, start: 96 }).unwrap();
    broken.write(VIDEO, &whole);
    assert_eq!(intact, dataset.load(&ClipId { episode: 2, start: 96 }).unwrap(), "faststart itself is no fault");
    broken.write(VIDEO, &front[..front.len() * 3 / 4]);
    dataset.load(&ClipId { episode: 2, start: 0 }).unwrap();
    let error = broken.load_error(2, 96);
    expect(&error, Exit::BadData, "decode_failed", VIDEO);
    assert!(error.what.contains("cut off"), "{error}");
}

#[test]
fn a_video_of_another_size() {
    let broken = Broken::new();
    let whole = broken.read(VIDEO);
    let entry = find_box(&whole, b"avc1") + 8 + 24;
    let mut small = whole.clone();
    small[entry..entry + 4].copy_from_slice(&[0, 64, 0, 64]);
    broken.write(VIDEO, &small);
    let error = broken.load_error(2, 0);
    expect(&error, Exit::BadData, "wrong_size", VIDEO);
    assert!(error.what.contains("64x64") && error.what.contains("128x128"), "{error}");
    // The container's word against the stream's.
    let mut video = VideoFile::open(&broken.path(VIDEO)).unwrap();
    expect(&video.read_frames(&[0]).unwrap_err(), Exit::BadData, "wrong_size", VIDEO);

    let broken = Broken::new();
    broken.replace("meta/info.json", "\"video.height\": 128", "\"video.height\": 120");
    expect(&broken.open_error(), Exit::BadData, "wrong_size", "info.json");
}

/// Every byte of a container's index, set to several values: an error or a picture, never a panic, never a hang.
#[test]
fn a_corrupt_container_never_panics() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("video.mp4");
    let whole = std::fs::read(recipes::repository("tests/data/bframes/eye_in_hand_rgb_000000.mp4")).unwrap();
    let moov = find_box(&whole, b"moov");
    let mut failed = 0;
    for at in (0..32).chain(moov..whole.len()) {
        for value in [0x00, 0x01, 0x7f, 0xff] {
            let mut changed = whole.clone();
            changed[at] = value;
            std::fs::write(&path, &changed).unwrap();
            match VideoFile::open(&path) {
                Ok(mut video) if at % 16 == 0 => failed += u32::from(video.read_frames(&[0]).is_err()),
                Ok(_) => {}
                Err(error) => {
                    one_line(error);
                    failed += 1;
                }
            }
        }
    }
    assert!(failed > 500, "only {failed} changes were noticed");
}

/// Damage in the coded pictures: decoded to something, or `decode_failed`; never a panic or another error.
#[test]
fn corrupt_pictures_never_panic() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("video.mp4");
    let whole = std::fs::read(recipes::repository("tests/data/bframes/eye_in_hand_rgb_000000.mp4")).unwrap();
    let (mdat, moov) = (find_box(&whole, b"mdat") + 8, find_box(&whole, b"moov"));
    let mut failed = 0;
    for at in (mdat..moov).step_by(53) {
        let mut changed = whole.clone();
        for byte in &mut changed[at..(at + 4).min(moov)] {
            *byte ^= 0x5a;
        }
        std::fs::write(&path, &changed).unwrap();
        let mut video = VideoFile::open(&path).unwrap();
        if let Err(error) = video.read_frames(&[0, 20, 40, 60]) {
            assert_eq!(one_line(error).code, "decode_failed");
            failed += 1;
        }
    }
    assert!(failed > 20, "only {failed} damages were noticed");
}

#[test]
fn parquet_damage_never_panics() {
    let broken = Broken::new();
    let whole = broken.read(PARQUET);
    let footer = whole.len() - 8;
    for at in (4..footer).step_by(97).chain(footer..whole.len()) {
        let mut changed = whole.clone();
        changed[at] ^= 0xff;
        broken.write(PARQUET, &changed);
        if let Err(error) = Dataset::open(&broken.config, &broken.model) {
            one_line(error);
        }
    }
}

#[test]
fn geometry_defects() {
    let broken = Broken::new();
    let whole = broken.read(TOKENS);
    let header = 8 + u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize;

    broken.write(TOKENS, LFS);
    expect(&broken.load_error(2, 16), Exit::BadData, "lfs_pointer", TOKENS);
    for bytes in [&b""[..], &whole[..whole.len() / 2], b"0123456789abcdef"] {
        broken.write(TOKENS, bytes);
        expect(&broken.load_error(2, 16), Exit::BadData, "not_openable", TOKENS);
    }
    let tensors = safetensors::SafeTensors::deserialize(&whole).unwrap();
    let offset = |name: &str| tensors.tensor(name).unwrap().data().as_ptr() as usize - whole.as_ptr() as usize;
    assert!(offset("tokens") >= header);

    // Not a number, in a row of its own: other rows still load.
    let mut changed = whole.clone();
    let row = offset("tokens") + 2 * 128 * 32 * 2;
    changed[row + 10..row + 12].copy_from_slice(&half::bf16::INFINITY.to_le_bytes());
    broken.write(TOKENS, &changed);
    expect(&broken.load_error(2, 32), Exit::BadData, "token_nonfinite", TOKENS);
    Dataset::open(&broken.config, &broken.model).unwrap().load(&ClipId { episode: 2, start: 16 }).unwrap();

    // A row that says it is of another frame.
    let mut changed = whole.clone();
    changed[offset("frames") + 8] = 32;
    broken.write(TOKENS, &changed);
    let error = broken.load_error(2, 16);
    expect(&error, Exit::BadData, "token_missing", TOKENS);
    assert!(error.what.contains("frame 32"), "{error}");

    // Fewer rows than the episode has.
    std::fs::copy(broken.path(&TOKENS.replace("000002", "000000")), broken.path(TOKENS)).unwrap();
    expect(&broken.load_error(2, 80), Exit::BadData, "token_missing", TOKENS);
    std::fs::remove_file(broken.path(TOKENS)).unwrap();
    expect(&broken.load_error(2, 16), Exit::BadData, "token_missing", TOKENS);

    let mut broken = Broken::new();
    broken.replace("geometry/info.json", "\"dim\": 32", "\"dim\": 16");
    expect(&broken.open_error(), Exit::Refused, "geometry_mismatch", "geometry/info.json");
    broken.model.geometry.token_dim = 16;
    expect(&broken.load_error(2, 16), Exit::BadData, "token_shape", TOKENS);
    broken.replace("geometry/info.json", "\"dim\": 16", "\"dim\": 0");
    expect(&broken.open_error(), Exit::BadData, "broken_metadata", "geometry/info.json");

    let mut broken = Broken::new();
    broken.config.clip_stride = 8;
    expect(&broken.open_error(), Exit::Refused, "geometry_mismatch", "clip_stride");
    std::fs::remove_file(broken.path("geometry/info.json")).unwrap();
    expect(&broken.open_error(), Exit::BadData, "geometry_missing", "geometry/info.json");
    broken.model.geometry.enabled = false;
    Dataset::open(&broken.config, &broken.model).expect("without the branch no cache is needed");
}

#[test]
fn recipe_and_dataset_disagree() {
    let mut broken = Broken::new();
    broken.config.views[1] = "observation.images.top".into();
    let error = broken.open_error();
    expect(&error, Exit::Refused, "missing_view", "info.json");
    assert!(error.hint.contains("observation.images.sideview_rgb"), "{error}");

    let mut broken = Broken::new();
    broken.config.validation_episodes = vec![1, 4];
    let error = broken.open_error();
    expect(&error, Exit::Refused, "unknown_episode", "validation_episodes");
    assert!(error.what.contains("episode 4"), "{error}");
    for held_out in [vec![], vec![0, 1, 2, 3]] {
        broken.config.validation_episodes = held_out;
        expect(&broken.open_error(), Exit::Refused, "empty_split", "validation_episodes");
    }

    let changes: [fn(&mut DataConfig, &mut ModelConfig); 6] = [
        |data, _| data.frames = 8,
        |data, _| data.frame_skip = 0,
        |data, _| data.clip_stride = 0,
        |_, model| model.num_views = 2,
        |_, model| model.action_num = 3,
        |_, model| model.proprio_dim = 4,
    ];
    for change in changes {
        let mut broken = Broken::new();
        change(&mut broken.config, &mut broken.model);
        let error = broken.open_error();
        expect(&error, Exit::Refused, "bad_window", "");
    }

    let broken = Broken::new();
    for (episode, start) in [(9, 0), (2, 102), (2, usize::MAX)] {
        expect(&broken.load_error(episode, start), Exit::BadData, "unknown_clip", "");
    }
}
