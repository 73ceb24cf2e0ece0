//! The MP4 container: from boxes to a table of samples in decode order, with the order in which they are shown.
//!
//! `re_mp4` parses single boxes. It is not given the whole file: its assembler indexes the tables without bounds, and
//! a zero-sized box makes it loop. So this module walks the box tree itself, hands each leaf to `re_mp4` as a slice
//! that ends with the box, and joins the tables with checked arithmetic.

use re_mp4::{
    Co64Box, CttsBox, ElstBox, HdlrBox, MdhdBox, MvhdBox, ReadBox, StcoBox, StscBox, StssBox, StszBox, SttsBox,
};
use std::fs::File;
use std::io::{Cursor, Read, Seek, SeekFrom};
use std::path::Path;

use crate::data::lerobot::lfs_pointer;
use crate::{Error, Result};

/// Samples one file may have: 20 hours at 50 fps. A corrupt table that claims more is refused before memory is taken.
const MAX_SAMPLES: usize = 3_600_000;

/// One coded picture, in decode order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Sample {
    /// First byte in the file.
    pub offset: u64,
    /// Bytes.
    pub size: u32,
    /// Whether decoding may start here.
    pub sync: bool,
    /// Composition time in units of the track's time base, before the edit list.
    pub composition: i64,
}

/// The video track of a file.
#[derive(Clone, Debug)]
pub(super) struct SampleTable {
    /// In decode order. Some may lie beyond the end of a file that was cut off; the frames before still decode.
    pub samples: Vec<Sample>,
    /// Frame number -> index into `samples`: composition order, without what the edit list cuts away.
    pub shown: Vec<usize>,
    /// Units of the track's time base in a second.
    pub timescale: u32,
    /// Coded size in pixels as the container states it.
    pub width: usize,
    pub height: usize,
    /// SPS and PPS as NAL units without start code.
    pub parameter_sets: Vec<Vec<u8>>,
    /// Bytes of the length field before each NAL unit: 1, 2 or 4.
    pub nal_length_size: usize,
}

fn not_openable(path: &Path, why: impl std::fmt::Display) -> Error {
    Error::data("not_openable", format!("video cannot be opened: {why}")).at(path)
}

/// Reads the sample table of the first video track.
///
/// # Errors
/// `lfs_pointer`; `not_openable` if the file is no MP4 with a whole `moov`; `wrong_codec` if its video is not H.264.
pub(super) fn read(file: &mut File, path: &Path) -> Result<SampleTable> {
    let length = file.metadata().map_err(|error| not_openable(path, error))?.len();
    let moov = read_moov(file, path, length)?;
    parse_moov(&moov, path, length)
}

fn read_moov(file: &mut File, path: &Path, length: u64) -> Result<Vec<u8>> {
    if length == 0 {
        return Err(not_openable(path, "the file is empty").hint("copy it again from its source"));
    }
    let io = |error: std::io::Error| not_openable(path, error);
    let mut position = 0_u64;
    let mut first = true;
    while position + 8 <= length {
        let mut header = [0_u8; 16];
        file.seek(SeekFrom::Start(position)).map_err(io)?;
        file.read_exact(&mut header[..8]).map_err(io)?;
        let kind = [header[4], header[5], header[6], header[7]];
        if first && header.starts_with(b"version ") {
            return Err(lfs_pointer(path));
        }
        if first && &kind != b"ftyp" {
            return Err(not_openable(path, "it is not an MP4 file"));
        }
        first = false;
        let mut size = u64::from(u32::from_be_bytes([header[0], header[1], header[2], header[3]]));
        if size == 1 && position + 16 <= length {
            file.read_exact(&mut header[8..]).map_err(io)?;
            size = header[8..].iter().fold(0, |value, byte| value << 8 | u64::from(*byte));
        } else if size == 0 {
            size = length - position; // by definition the last box, up to the end of the file
        }
        if size < 8 || size > length - position {
            return Err(not_openable(path, "it ends in the middle of a box, so it was cut off or is corrupt")
                .hint("copy it again from its source"));
        }
        if &kind == b"moov" {
            let mut moov = vec![0; usize::try_from(size).map_err(|error| not_openable(path, error))?];
            file.seek(SeekFrom::Start(position)).map_err(io)?;
            file.read_exact(&mut moov).map_err(io)?;
            return Ok(moov);
        }
        position += size;
    }
    if first {
        return Err(not_openable(path, "it is not an MP4 file"));
    }
    Err(not_openable(path, "it has no index (moov box), so it was cut off while it was written or copied")
        .hint("copy it again from its source"))
}

/// One box: its kind, and where header and content lie in the slice.
struct Boxed<'a> {
    kind: [u8; 4],
    /// Header and content.
    whole: &'a [u8],
    header: usize,
}

impl<'a> Boxed<'a> {
    fn content(&self) -> &'a [u8] {
        &self.whole[self.header..]
    }

    /// Lets `re_mp4` parse the box; it can read no byte beyond it.
    fn parse<T>(&self) -> Result<T, String>
    where
        T: for<'r> ReadBox<&'r mut Cursor<&'a [u8]>>,
    {
        let mut cursor = Cursor::new(self.whole);
        cursor.set_position(self.header as u64);
        // `re_mp4` takes the start of a box to be 8 bytes before its content, also after a 16-byte header.
        let size = (self.whole.len() - (self.header - 8)) as u64;
        T::read_box(&mut cursor, size).map_err(|error| format!("{} box: {error}", name(self.kind)))
    }
}

fn name(kind: [u8; 4]) -> String {
    kind.iter().map(|byte| if byte.is_ascii_graphic() { char::from(*byte) } else { '?' }).collect()
}

/// The boxes that fill `bytes`; all sizes are checked.
fn children(bytes: &[u8]) -> Result<Vec<Boxed<'_>>, String> {
    let mut found = Vec::new();
    let mut rest = bytes;
    // QuickTime closes some containers with a 32-bit zero, so a short rest is no error.
    while rest.len() >= 8 {
        let kind = [rest[4], rest[5], rest[6], rest[7]];
        let short = u32::from_be_bytes([rest[0], rest[1], rest[2], rest[3]]);
        let (header, size) = match short {
            0 => (8, rest.len() as u64),
            1 if rest.len() >= 16 => (16, rest[8..16].iter().fold(0_u64, |value, byte| value << 8 | u64::from(*byte))),
            _ => (8, u64::from(short)),
        };
        if size < header as u64 || size > rest.len() as u64 {
            return Err(format!("{} box has a size beyond its parent", name(kind)));
        }
        let (whole, after) = rest.split_at(size as usize);
        found.push(Boxed { kind, whole, header });
        rest = after;
    }
    Ok(found)
}

fn find<'b, 'a>(boxes: &'b [Boxed<'a>], kind: &[u8; 4]) -> Result<&'b Boxed<'a>, String> {
    boxes.iter().find(|candidate| &candidate.kind == kind).ok_or_else(|| format!("{} box not found", name(*kind)))
}

fn optional<'a, T>(boxes: &[Boxed<'a>], kind: &[u8; 4]) -> Result<Option<T>, String>
where
    T: for<'r> ReadBox<&'r mut Cursor<&'a [u8]>>,
{
    boxes.iter().find(|candidate| &candidate.kind == kind).map(Boxed::parse).transpose()
}

/// Why a track gives no table: a broken container, or another codec.
enum Fault {
    Broken(String),
    Codec(String),
}

impl From<String> for Fault {
    fn from(why: String) -> Self {
        Self::Broken(why)
    }
}

fn parse_moov(moov: &[u8], path: &Path, file_length: u64) -> Result<SampleTable> {
    video_track(moov, file_length).map_err(|fault| match fault {
        Fault::Broken(why) => not_openable(path, format!("the container is corrupt: {why}")),
        Fault::Codec(codec) => Error::data("wrong_codec", format!("video codec is {codec}, only H.264 can be decoded"))
            .at(path)
            .hint("convert it with `ffmpeg -i IN -c:v libx264 -pix_fmt yuv420p OUT`"),
    })
}

fn video_track(moov: &[u8], file_length: u64) -> Result<SampleTable, Fault> {
    let top = children(moov)?;
    let inside = children(find(&top, b"moov")?.content())?;
    let movie: MvhdBox = find(&inside, b"mvhd")?.parse()?;
    if inside.iter().any(|found| &found.kind == b"mvex") {
        return Err(Fault::Broken("fragmented MP4 is not supported".into()));
    }
    for track in inside.iter().filter(|found| &found.kind == b"trak") {
        let track = children(track.content())?;
        let media = children(find(&track, b"mdia")?.content())?;
        let handler: HdlrBox = find(&media, b"hdlr")?.parse()?;
        if &handler.handler_type.value != b"vide" {
            continue;
        }
        let edits = match track.iter().find(|found| &found.kind == b"edts") {
            Some(edits) => optional::<ElstBox>(&children(edits.content())?, b"elst")?,
            None => None,
        };
        let header: MdhdBox = find(&media, b"mdhd")?.parse()?;
        let information = children(find(&media, b"minf")?.content())?;
        let tables = children(find(&information, b"stbl")?.content())?;
        let entry = sample_entry(find(&tables, b"stsd")?.content())?;
        let samples = samples(&tables, file_length)?;
        let shown = shown(&samples, edits.as_ref(), movie.timescale, header.timescale)?;
        return Ok(SampleTable {
            samples,
            shown,
            timescale: header.timescale,
            width: entry.width,
            height: entry.height,
            parameter_sets: entry.parameter_sets,
            nal_length_size: entry.nal_length_size,
        });
    }
    Err(Fault::Broken("it has no video track".into()))
}

struct SampleEntry {
    width: usize,
    height: usize,
    parameter_sets: Vec<Vec<u8>>,
    nal_length_size: usize,
}

/// The first sample description (ISO/IEC 14496-12 12.1.3, 14496-15 5.4.2).
fn sample_entry(stsd_content: &[u8]) -> Result<SampleEntry, Fault> {
    let entries = children(stsd_content.get(8..).ok_or_else(|| "stsd box is too short".to_string())?)?;
    let [entry] = entries.as_slice() else {
        return Err(Fault::Broken(format!("{} sample descriptions where one is expected", entries.len())));
    };
    match &entry.kind {
        b"avc1" | b"avc3" => {}
        b"av01" => return Err(Fault::Codec("AV1".into())),
        b"hvc1" | b"hev1" => return Err(Fault::Codec("HEVC".into())),
        b"vp09" => return Err(Fault::Codec("VP9".into())),
        b"mp4v" => return Err(Fault::Codec("MPEG-4 part 2".into())),
        other => return Err(Fault::Codec(name(*other))),
    }
    // A visual sample entry has 78 bytes of fixed fields; width and height stand at 24 and 26.
    let content = entry.content();
    let fixed = content.get(..78).ok_or_else(|| "avc1 box is too short".to_string())?;
    let (nal_length_size, parameter_sets) = decoder_configuration(find(&children(&content[78..])?, b"avcC")?.content())
        .ok_or_else(|| "avcC box is corrupt".to_string())?;
    Ok(SampleEntry {
        width: usize::from(u16::from_be_bytes([fixed[24], fixed[25]])),
        height: usize::from(u16::from_be_bytes([fixed[26], fixed[27]])),
        parameter_sets,
        nal_length_size,
    })
}

/// AVCDecoderConfigurationRecord (ISO/IEC 14496-15 5.3.3.1): size of the NAL length fields, then SPS and PPS.
/// (`re_mp4` does not export its type.)
fn decoder_configuration(content: &[u8]) -> Option<(usize, Vec<Vec<u8>>)> {
    let nal_length_size = usize::from(content.get(4)? & 3) + 1;
    let mut sets = Vec::new();
    let mut rest = content.get(5..)?;
    for count_bits in [0x1f, 0xff] {
        let (count, after) = rest.split_first()?;
        rest = after;
        for _ in 0..count & count_bits {
            let (length, after) = rest.split_at_checked(2)?;
            let (unit, after) = after.split_at_checked(usize::from(u16::from_be_bytes([length[0], length[1]])))?;
            sets.push(unit.to_vec());
            rest = after;
        }
    }
    (nal_length_size != 3).then_some((nal_length_size, sets))
}

/// Joins stsz, stsc, stco/co64, stts, ctts and stss.
fn samples(tables: &[Boxed<'_>], file_length: u64) -> Result<Vec<Sample>, String> {
    let sizes: StszBox = find(tables, b"stsz")?.parse()?;
    let count = sizes.sample_count as usize;
    if count > MAX_SAMPLES || count as u64 > file_length {
        return Err(format!("stsz box claims {count} samples"));
    }
    let times: SttsBox = find(tables, b"stts")?.parse()?;
    let offsets: Option<CttsBox> = optional(tables, b"ctts")?;
    let sync: Option<StssBox> = optional(tables, b"stss")?;
    let mut places = chunk_places(tables, count)?.into_iter();

    // Run-length tables, cut at the count so that a corrupt run cannot take memory.
    let mut deltas = times
        .entries
        .iter()
        .flat_map(|run| std::iter::repeat_n(i64::from(run.sample_delta), (run.sample_count as usize).min(count)));
    let mut composition_offsets = offsets
        .iter()
        .flat_map(|table| &table.entries)
        .flat_map(|run| std::iter::repeat_n(i64::from(run.sample_offset), (run.sample_count as usize).min(count)));

    let mut samples = Vec::with_capacity(count);
    let mut decode_time = 0_i64;
    let mut within_chunk = 0_u64;
    for index in 0..count {
        let size = if sizes.sample_size == 0 {
            *sizes.sample_sizes.get(index).ok_or("stsz box is too short")?
        } else {
            sizes.sample_size
        };
        let (chunk_offset, starts_chunk) = places.next().ok_or("the chunk tables hold fewer samples than stsz")?;
        if starts_chunk {
            within_chunk = 0;
        }
        let offset = chunk_offset.checked_add(within_chunk).ok_or("sample offset overflows")?;
        within_chunk += u64::from(size);
        let shift = match &offsets {
            Some(_) => composition_offsets.next().ok_or("ctts box has fewer entries than stsz")?,
            None => 0,
        };
        samples.push(Sample { offset, size, sync: sync.is_none(), composition: decode_time + shift });
        // At most 3.6e6 samples of at most 2^32: no overflow.
        decode_time += deltas.next().ok_or("stts box has fewer entries than stsz")?;
    }
    for number in sync.iter().flat_map(|table| &table.entries) {
        let index = (*number as usize).checked_sub(1).ok_or("stss box counts from 0")?;
        samples.get_mut(index).ok_or("stss box names a sample that does not exist")?.sync = true;
    }
    Ok(samples)
}

/// For each sample: its chunk's offset, and whether it is the first of its chunk.
fn chunk_places(tables: &[Boxed<'_>], count: usize) -> Result<Vec<(u64, bool)>, String> {
    let runs: StscBox = find(tables, b"stsc")?.parse()?;
    let chunks: Vec<u64> = match optional::<StcoBox>(tables, b"stco")? {
        Some(table) => table.entries.into_iter().map(u64::from).collect(),
        None => find(tables, b"co64")?.parse::<Co64Box>()?.entries,
    };
    let mut places = Vec::with_capacity(count);
    for (index, run) in runs.entries.iter().enumerate() {
        let first = (run.first_chunk as usize).checked_sub(1).ok_or("stsc box counts from 0")?;
        let end = match runs.entries.get(index + 1) {
            Some(next) => (next.first_chunk as usize).saturating_sub(1).min(chunks.len()),
            None => chunks.len(),
        };
        for chunk in chunks.get(first..end).ok_or("stsc box names a chunk that does not exist")? {
            for sample in 0..run.samples_per_chunk {
                if places.len() == count {
                    return Ok(places);
                }
                places.push((*chunk, sample == 0));
            }
        }
    }
    Ok(places)
}

/// Composition order, cut by the edit list (ISO/IEC 14496-12 8.6.6). An empty edit only delays the start.
fn shown(
    samples: &[Sample],
    edits: Option<&ElstBox>,
    movie_timescale: u32,
    media_timescale: u32,
) -> Result<Vec<usize>, String> {
    let mut order: Vec<usize> = (0..samples.len()).collect();
    order.sort_by_key(|index| samples[*index].composition);
    let Some(edits) = edits else { return Ok(order) };
    let empty = if edits.version == 1 { u64::MAX } else { u64::from(u32::MAX) };
    let mut real = edits.entries.iter().filter(|edit| edit.media_time != empty);
    let Some(edit) = real.next() else { return Ok(order) };
    if real.next().is_some() {
        return Err("an edit list with several parts is not supported".into());
    }
    let start = i128::from(edit.media_time);
    // Duration 0 means "to the end". The movie's clock is coarser than the track's, so the end may fall up to one
    // of its ticks early: only what starts after that tick is cut.
    let end_ticks = i128::from(edit.segment_duration) + 1;
    order.retain(|index| {
        let after_start = i128::from(samples[*index].composition) - start;
        let before_end = edit.segment_duration == 0
            || after_start * i128::from(movie_timescale) < end_ticks * i128::from(media_timescale);
        after_start >= 0 && before_end
    });
    Ok(order)
}
