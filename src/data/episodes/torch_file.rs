//! Files that `torch.save` wrote: a zip archive of one pickle and the raw numbers that it names.
//!
//! A pickle is a program. candle's reader runs none of it: it only notes what would be called. Here each opcode is
//! looked at before candle takes it, so that a callable outside a short list is refused where it is named, and a file
//! that lies about its sizes, nests without end or copies itself is refused before it takes memory or stack.

use candle_core::pickle::{Object, Stack};
use half::{bf16, f16};
use std::fs::File;
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};
use zip::{CompressionMethod, ZipArchive};

use crate::data::lerobot::{is_lfs_pointer, lfs_pointer};
use crate::error::tensor_words;
use crate::{Error, Result};

/// All that a file of tensors, numbers and texts needs to name.
const CALLABLES: [(&str, &str); 12] = [
    ("torch._utils", "_rebuild_tensor_v2"),
    ("collections", "OrderedDict"),
    ("torch", "FloatStorage"),
    ("torch", "HalfStorage"),
    ("torch", "BFloat16Storage"),
    ("torch", "DoubleStorage"),
    ("torch", "LongStorage"),
    ("torch", "IntStorage"),
    ("torch", "ShortStorage"),
    ("torch", "CharStorage"),
    ("torch", "ByteStorage"),
    ("torch", "BoolStorage"),
];
/// Bytes of a pickle at most; that of an hour of frames has 300 kB.
const MAX_PICKLE: u64 = 4 << 20;
/// Opcodes that put one object into another, at most: a tensor has 7, and a list one for a thousand items. It bounds
/// how deep objects lie in each other, which are cloned and dropped by recursion.
const MAX_NESTED: usize = 500;
/// Objects that are copied to or from the memo, at most.
const MAX_COPIED: usize = 1 << 20;

/// An open file.
pub(super) struct TorchFile {
    path: PathBuf,
    archive: ZipArchive<File>,
    /// What stands before `data.pkl` in the archive.
    prefix: String,
    /// Bytes of the whole file; nothing in it can be larger.
    length: u64,
    root: Object,
}

/// Where a tensor's numbers lie.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct TensorPlace {
    pub shape: Vec<usize>,
    /// In numbers.
    strides: Vec<usize>,
    offset: usize,
    kind: FloatKind,
    /// Name of the storage.
    storage: String,
    /// Numbers in the storage.
    count: usize,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum FloatKind {
    F32,
    F16,
    Bf16,
}

impl FloatKind {
    fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
        }
    }

    fn number(self, bytes: &[u8]) -> Option<f32> {
        Some(match self {
            Self::F32 => f32::from_le_bytes(bytes.try_into().ok()?),
            Self::F16 => f16::from_le_bytes(bytes.try_into().ok()?).to_f32(),
            Self::Bf16 => bf16::from_le_bytes(bytes.try_into().ok()?).to_f32(),
        })
    }
}

impl TorchFile {
    /// Opens a file and reads its pickle; no numbers of tensors.
    ///
    /// # Errors
    /// `file_missing`; `lfs_pointer`; `not_openable` (no permission); `pickle_refused`, naming the callable;
    /// `latent_corrupt`.
    pub fn open(path: &Path) -> Result<Self> {
        let unreadable = |error: std::io::Error| match error.kind() {
            ErrorKind::NotFound => Error::data("file_missing", "latent file is missing").at(path),
            _ => Error::data("not_openable", format!("latent file cannot be read: {error}")).at(path),
        };
        // Asked first: opening a named pipe would wait for its writer.
        let metadata = std::fs::metadata(path).map_err(unreadable)?;
        if !metadata.is_file() {
            return Err(Error::data("not_openable", "it is no regular file").at(path));
        }
        let mut file = File::open(path).map_err(unreadable)?;
        let mut start = [0; 24];
        let read = file.read(&mut start).map_err(unreadable)?;
        if is_lfs_pointer(&start[..read]) {
            return Err(lfs_pointer(path));
        }
        let length = metadata.len();
        let archive =
            ZipArchive::new(file).map_err(|error| corrupt(path, format!("it is no whole archive: {error}")))?;
        let mut file = Self { path: path.to_owned(), archive, prefix: String::new(), length, root: Object::None };
        let pickles: Vec<String> = file.names()?.into_iter().filter(|name| name.ends_with("data.pkl")).collect();
        let [pickle] = &pickles[..] else {
            return Err(corrupt(path, format!("it has {} entries data.pkl where torch writes one", pickles.len())));
        };
        file.prefix = pickle.trim_end_matches("data.pkl").to_owned();
        if file.names()?.contains(&format!("{}byteorder", file.prefix)) && file.entry("byteorder", 16)? != b"little" {
            return Err(corrupt(path, "its numbers are not little-endian".into()));
        }
        file.root = unpickle(&file.entry("data.pkl", MAX_PICKLE)?, path)?;
        Ok(file)
    }

    /// What was saved.
    pub fn root(&self) -> &Object {
        &self.root
    }

    /// A value of the saved dict; `None` if it is not there.
    pub fn field(&self, name: &str) -> Option<&Object> {
        let Object::Dict(pairs) = &self.root else { return None };
        pairs.iter().find(|(key, _)| matches!(key, Object::Unicode(key) if key == name)).map(|(_, value)| value)
    }

    /// A tensor of floats as the pickle describes it; `field` names it in errors. Reads no numbers.
    ///
    /// # Errors
    /// `latent_corrupt` if it is none, or would reach beyond its storage.
    pub fn place(&self, tensor: &Object, field: &str) -> Result<TensorPlace> {
        let place = tensor_place(tensor).map_err(|why| self.corrupt(format!("{field} {why}")))?;
        let numbers = place.shape.iter().try_fold(1_usize, |product, side| product.checked_mul(*side));
        // Strides of 0 repeat numbers, so the storage's size alone bounds nothing.
        if numbers.is_none_or(|numbers| numbers as u64 > self.length) {
            return Err(self.corrupt(format!("{field} has shape {:?}, more than the file can hold", place.shape)));
        }
        let empty = place.shape.contains(&0);
        let last = place.shape.iter().zip(&place.strides).try_fold(place.offset, |last, (side, stride)| {
            side.saturating_sub(1).checked_mul(*stride).and_then(|reach| last.checked_add(reach))
        });
        if !empty && last.is_none_or(|last| last >= place.count) {
            return Err(self.corrupt(format!("{field} reaches beyond its {} stored numbers", place.count)));
        }
        Ok(place)
    }

    /// The numbers of a tensor, row-major.
    ///
    /// # Errors
    /// `latent_corrupt`.
    pub fn numbers(&mut self, place: &TensorPlace, field: &str) -> Result<Vec<f32>> {
        let bytes = self.entry(&format!("data/{}", place.storage), self.length)?;
        let size = place.kind.bytes();
        if place.count.checked_mul(size) != Some(bytes.len()) {
            let what = format!("{field} has {} stored bytes where {} numbers are told", bytes.len(), place.count);
            return Err(self.corrupt(what));
        }
        let stored = |at: usize| bytes.get(at * size..(at + 1) * size).and_then(|bytes| place.kind.number(bytes));
        let mut starts = vec![place.offset];
        for (side, stride) in place.shape.iter().zip(&place.strides) {
            starts = starts.into_iter().flat_map(|start| (0..*side).map(move |index| start + index * stride)).collect();
        }
        let numbers: Option<Vec<f32>> = starts.into_iter().map(stored).collect();
        numbers.ok_or_else(|| self.corrupt(format!("{field} reaches beyond its numbers")))
    }

    fn names(&self) -> Result<Vec<String>> {
        let names = self.archive.file_names().map(|name| name.map(|name| name.into_owned()));
        names.collect::<Result<_, _>>().map_err(|error| self.corrupt(format!("an entry has a broken name: {error}")))
    }

    /// The bytes of an entry, of which there are `limit` at most, checked against its checksum.
    fn entry(&mut self, name: &str, limit: u64) -> Result<Vec<u8>> {
        let broken = |why: String| corrupt(&self.path, format!("its entry {name} is broken: {why}"));
        let mut entry =
            self.archive.by_name(&format!("{}{name}", self.prefix)).map_err(|error| broken(error.to_string()))?;
        if entry.compression() != CompressionMethod::Stored {
            return Err(broken("it is compressed, which torch never does".into()));
        }
        let size = entry.size();
        if size > limit.min(self.length) {
            return Err(broken(format!("{size} bytes are too many")));
        }
        let mut bytes = Vec::with_capacity(size as usize);
        let read = (&mut entry).take(size + 1).read_to_end(&mut bytes).map_err(|error| broken(error.to_string()))?;
        if read as u64 != size {
            return Err(broken(format!("it has {read} bytes where {size} are told")));
        }
        Ok(bytes)
    }

    /// The error for a file whose content is not what `torch.save` writes.
    pub fn corrupt(&self, why: String) -> Error {
        corrupt(&self.path, why)
    }
}

fn corrupt(path: &Path, why: String) -> Error {
    const MAX_WORDS: usize = 300; // candle quotes whole objects
    let why: String = why.chars().take(MAX_WORDS).collect();
    Error::data("latent_corrupt", format!("latent file is broken: {why}"))
        .at(path)
        .hint("copy the file again from its source")
}

fn tensor_place(tensor: &Object) -> Result<TensorPlace, String> {
    let Object::Reduce { callable, args } = tensor else { return Err("is no tensor".into()) };
    let (Object::Class { class_name, .. }, Object::Tuple(args)) = (&**callable, &**args) else {
        return Err("is no tensor".into());
    };
    let [Object::PersistentLoad(storage), offset, Object::Tuple(shape), Object::Tuple(strides), ..] = &args[..] else {
        return Err("is no tensor".into());
    };
    if class_name != "_rebuild_tensor_v2" || shape.len() != strides.len() {
        return Err("is no tensor".into());
    }
    let Object::Tuple(storage) = &**storage else { return Err("has no storage".into()) };
    let [_, Object::Class { class_name, .. }, Object::Unicode(key), _, count] = &storage[..] else {
        return Err("has no storage".into());
    };
    let kind = match class_name.as_str() {
        "FloatStorage" => FloatKind::F32,
        "HalfStorage" => FloatKind::F16,
        "BFloat16Storage" => FloatKind::Bf16,
        other => return Err(format!("is a {other} where floats of 16 or 32 bits are needed")),
    };
    let numbers = |objects: &[Object]| objects.iter().map(natural).collect::<Option<Vec<usize>>>();
    let (Some(shape), Some(strides), Some(offset), Some(count)) =
        (numbers(shape), numbers(strides), natural(offset), natural(count))
    else {
        return Err("has a negative size".into());
    };
    Ok(TensorPlace { shape, strides, offset, kind, storage: key.clone(), count })
}

/// A whole number that is not negative.
pub(super) fn natural(object: &Object) -> Option<usize> {
    match object {
        Object::Int(value) => usize::try_from(*value).ok(),
        Object::Long(value) => usize::try_from(*value).ok(),
        _ => None,
    }
}

/// Opcodes that candle would follow into a large allocation or a panic, or that copy or nest objects.
mod opcode {
    pub const BINUNICODE: u8 = b'X';
    pub const LONG1: u8 = 0x8a;
    pub const GLOBAL: u8 = b'c';
    /// Copies to the memo and from it.
    pub const COPIES: [u8; 4] = [b'q', b'r', b'h', b'j'];
    /// Everything that puts an object into another: tuples, lists, dicts, calls.
    pub const NESTS: [u8; 13] = [b't', 0x85, 0x86, 0x87, b'R', b'b', 0x81, b'Q', b'a', b'e', b's', b'u', b'd'];
}

fn unpickle(bytes: &[u8], path: &Path) -> Result<Object> {
    let broken = |why: &str| corrupt(path, format!("its pickle is broken: {why}"));
    let mut rest = bytes;
    let mut stack = Stack::empty();
    let (mut nested, mut copied) = (0, 0);
    loop {
        let (code, operands) = rest.split_first().ok_or_else(|| broken("it ends before its end"))?;
        match (*code, operands) {
            (opcode::BINUNICODE, [a, b, c, d, text @ ..])
                if u32::from_le_bytes([*a, *b, *c, *d]) as usize > text.len() =>
            {
                return Err(broken("a text is longer than the pickle"));
            }
            (opcode::LONG1, [count, ..]) if *count > 8 => return Err(broken("a number is too large")),
            _ => {}
        }
        let ended = stack.read(&mut rest).map_err(|error| broken(&tensor_words(&error)))?;
        if *code == opcode::GLOBAL {
            allow(stack.stack().last(), path)?;
        }
        if opcode::NESTS.contains(code) {
            nested += 1;
        }
        if opcode::COPIES.contains(code) {
            copied += stack.stack().last().map_or(0, size);
        }
        if nested > MAX_NESTED || copied > MAX_COPIED {
            return Err(broken("its objects nest or repeat without end"));
        }
        if ended {
            return stack.finalize().map_err(|error| broken(&tensor_words(&error)));
        }
    }
}

fn allow(named: Option<&Object>, path: &Path) -> Result<()> {
    match named {
        Some(Object::Class { module_name, class_name })
            if CALLABLES.contains(&(module_name.as_str(), class_name.as_str())) =>
        {
            Ok(())
        }
        Some(Object::Class { module_name, class_name }) => {
            let name: String = format!("{module_name}.{class_name}").chars().take(200).collect();
            Err(Error::data("pickle_refused", format!("the file names {name}, which is not called"))
                .at(path)
                .hint("latent files need only tensors, numbers and texts: where does this one come from?"))
        }
        _ => Err(corrupt(path, "its pickle names no callable where one belongs".into())),
    }
}

/// Objects in an object, itself included.
fn size(object: &Object) -> usize {
    1 + match object {
        Object::Tuple(items) | Object::List(items) => items.iter().map(size).sum(),
        Object::Dict(pairs) => pairs.iter().map(|(key, value)| size(key) + size(value)).sum(),
        Object::Reduce { callable, args } | Object::Build { callable, args } => size(callable) + size(args),
        Object::PersistentLoad(id) => size(id),
        // A text of many bytes is as large as many numbers.
        Object::Unicode(text) => text.len() / size_of::<Object>(),
        _ => 0,
    }
}
