//! Numeric columns of one episode's parquet file, as rows of f32.

use parquet::column::page::PageReader;
use parquet::column::reader::{ColumnReader, ColumnReaderImpl};
use parquet::data_type::DataType;
use parquet::file::metadata::{ColumnChunkMetaData, RowGroupMetaData};
use parquet::file::reader::{FileReader, SerializedFileReader};
use std::fs::File;
use std::io::{ErrorKind, Read, Seek};
use std::path::Path;

use super::lerobot::{is_lfs_pointer, lfs_pointer};
use crate::{Error, Result};

/// Numbers that a column of one episode may have: six hours of a hundred at 30 rows a second.
const MOST_VALUES: usize = 1 << 26;

/// A column of vectors: `rows` times `width` values, row after row.
#[derive(Clone, Debug, PartialEq)]
pub struct Column {
    pub width: usize,
    /// [rows, width]
    pub values: Vec<f64>,
}

/// An open parquet file.
pub struct ColumnFile<'a> {
    path: &'a Path,
    reader: SerializedFileReader<File>,
}

impl<'a> ColumnFile<'a> {
    /// Opens a file and reads its footer.
    ///
    /// # Errors
    /// `file_missing`; `lfs_pointer`; `not_openable` if it is empty, cut off or no parquet file.
    pub fn open(path: &'a Path) -> Result<Self> {
        let broken = |why: String| {
            Error::data("not_openable", format!("parquet file cannot be opened: {why}"))
                .at(path)
                .hint("copy it again from its source")
        };
        let mut file = File::open(path).map_err(|error| match error.kind() {
            ErrorKind::NotFound => Error::data("file_missing", "parquet file is missing").at(path),
            _ => broken(error.to_string()),
        })?;
        let mut start = Vec::new();
        (&mut file).take(64).read_to_end(&mut start).map_err(|error| broken(error.to_string()))?;
        if is_lfs_pointer(&start) {
            return Err(lfs_pointer(path));
        }
        if start.is_empty() {
            return Err(broken("it is empty".into()));
        }
        if !start.starts_with(b"PAR1") {
            return Err(broken("it is not a parquet file".into()));
        }
        file.rewind().map_err(|error| broken(error.to_string()))?;
        let size = file.metadata().map_err(|error| broken(error.to_string()))?.len();
        let reader = SerializedFileReader::new(file)
            .map_err(|error| broken(format!("{error}, so it was cut off or is corrupt")))?;
        // The library panics at a place or a size below zero.
        let groups = reader.metadata().row_groups().iter();
        if let Some(column) = groups.flat_map(RowGroupMetaData::columns).find(|column| !lies_within(column, size)) {
            return Err(broken(format!("its footer puts column {} outside of the file", column.column_path())));
        }
        Ok(Self { path, reader })
    }

    /// Reads a column that a dataset need not have.
    ///
    /// # Errors
    /// `not_openable` if its pages are corrupt.
    pub fn read_optional(&self, name: &str) -> Result<Option<Column>> {
        match self.read(name) {
            Ok(column) => Ok(Some(column)),
            Err(error) if matches!(error.code, "missing_column" | "wrong_type") => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Rows of the file.
    pub fn rows(&self) -> usize {
        usize::try_from(self.reader.metadata().file_metadata().num_rows()).unwrap_or(0)
    }

    /// Reads a column of numbers, or of lists of numbers that are all equally long.
    ///
    /// # Errors
    /// `missing_column`; `wrong_type` (no numbers, a null, lists of unequal length); `not_openable` if its pages are
    /// corrupt.
    pub fn read(&self, name: &str) -> Result<Column> {
        let schema = self.reader.metadata().file_metadata().schema_descr();
        let leaf =
            schema.columns().iter().position(|column| column.path().parts().first().is_some_and(|part| part == name));
        let Some(leaf) = leaf else {
            let mut names: Vec<&str> = schema.root_schema().get_fields().iter().map(|field| field.name()).collect();
            names.sort_unstable();
            return Err(Error::data("missing_column", format!("parquet file has no column {name}"))
                .at(self.path)
                .hint(format!("it has {}", names.join(", "))));
        };
        let levels = (schema.column(leaf).max_def_level(), schema.column(leaf).max_rep_level());
        let mut column = Rows { levels, values: Vec::new(), lengths: Vec::new() };
        let mut promised = 0;
        for group in 0..self.reader.num_row_groups() {
            let group_rows = self.reader.metadata().row_group(group).num_rows();
            let group_rows = usize::try_from(group_rows).unwrap_or(0);
            let broken = |error: parquet::errors::ParquetError| {
                Error::data("not_openable", format!("column {name} cannot be read: {error}")).at(self.path)
            };
            let reader = self.reader.get_row_group(group).map_err(broken)?;
            promised += promised_values(reader.get_column_page_reader(leaf).map_err(broken)?).map_err(broken)?;
            if promised > MOST_VALUES {
                let what = format!("column {name} has {promised} values or more, {MOST_VALUES} at most can be read");
                return Err(Error::data("not_openable", what)
                    .at(self.path)
                    .hint("copy the file again from its source"));
            }
            let reader = reader.get_column_reader(leaf).map_err(broken)?;
            let read = match reader {
                ColumnReader::FloatColumnReader(reader) => column.append(reader, group_rows, f64::from),
                ColumnReader::DoubleColumnReader(reader) => column.append(reader, group_rows, |value| value),
                ColumnReader::Int32ColumnReader(reader) => column.append(reader, group_rows, f64::from),
                // Exact up to 2^53: indices and counts.
                ColumnReader::Int64ColumnReader(reader) => column.append(reader, group_rows, |value| value as f64),
                _ => return Err(self.wrong_type(name, "does not hold numbers")),
            };
            match read {
                Ok(()) => {}
                Err(Fault::Parquet(error)) => return Err(broken(error)),
                Err(Fault::Null) => return Err(self.wrong_type(name, "has an empty value")),
            }
        }
        let width = column.lengths.first().copied().unwrap_or(0);
        if column.lengths.iter().any(|length| *length != width) {
            return Err(self.wrong_type(name, "has rows of unequal length"));
        }
        if column.lengths.len() != self.rows() {
            return Err(self.wrong_type(name, "has another number of rows than its file"));
        }
        Ok(Column { width, values: column.values })
    }

    fn wrong_type(&self, name: &str, why: &str) -> Error {
        Error::data("wrong_type", format!("column {name} {why}")).at(self.path)
    }
}

/// Is where the footer puts this column inside a file of `size` bytes?
fn lies_within(column: &ColumnChunkMetaData, size: u64) -> bool {
    let start = column.dictionary_page_offset().unwrap_or(column.data_page_offset());
    let end = start.checked_add(column.compressed_size());
    start >= 0 && column.compressed_size() >= 0 && end.is_some_and(|end| end as u64 <= size)
}

/// How many values the pages of a column say they have. Runs of equal values take no room, so a few damaged bytes can promise
/// billions, and a column reader makes room for all of them before it looks.
fn promised_values(pages: Box<dyn PageReader>) -> Result<usize, parquet::errors::ParquetError> {
    let mut promised = 0;
    for page in pages {
        let page = page?;
        let values = page.num_values() as usize;
        match page.is_dictionary_page() {
            true if values > page.buffer().len() => {
                let what = format!("its dictionary says {values} values and has {} bytes", page.buffer().len());
                return Err(parquet::errors::ParquetError::General(what));
            }
            true => {}
            false => promised += values,
        }
    }
    Ok(promised)
}

enum Fault {
    Parquet(parquet::errors::ParquetError),
    Null,
}

struct Rows {
    /// Largest definition and repetition level of the leaf.
    levels: (i16, i16),
    values: Vec<f64>,
    /// Values in each row.
    lengths: Vec<usize>,
}

impl Rows {
    fn append<T: DataType>(
        &mut self,
        mut reader: ColumnReaderImpl<T>,
        rows: usize,
        number: impl Fn(T::T) -> f64,
    ) -> Result<(), Fault> {
        let (max_definition, max_repetition) = self.levels;
        let (mut definitions, mut repetitions, mut values) = (Vec::new(), Vec::new(), Vec::new());
        let (_, _, levels) = reader
            .read_records(
                rows,
                (max_definition > 0).then_some(&mut definitions),
                (max_repetition > 0).then_some(&mut repetitions),
                &mut values,
            )
            .map_err(Fault::Parquet)?;
        if values.len() != levels || definitions.iter().any(|level| *level != max_definition) {
            return Err(Fault::Null);
        }
        for index in 0..levels {
            // Repetition level 0 starts a row.
            match repetitions.get(index) {
                Some(level) if *level > 0 => match self.lengths.last_mut() {
                    Some(length) => *length += 1,
                    None => return Err(Fault::Null),
                },
                _ => self.lengths.push(1),
            }
        }
        self.values.extend(values.into_iter().map(number));
        Ok(())
    }
}
