//! The number of a scheduler's job. That of an array's task is two numbers: the first alone means the whole array to
//! every command, so that cancelling by it would end the others too.

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::fmt;
use std::str::FromStr;

/// A job, or one task of an array of jobs. Written as Slurm writes it: `123`, `123_4`; as JSON a number where it is one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct JobId {
    job: u64,
    task: Option<u32>,
}

impl JobId {
    pub fn task(job: u64, task: u32) -> Self {
        Self { job, task: Some(task) }
    }
}

impl From<u64> for JobId {
    fn from(job: u64) -> Self {
        Self { job, task: None }
    }
}

impl fmt::Display for JobId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.task {
            Some(task) => write!(f, "{}_{task}", self.job),
            None => write!(f, "{}", self.job),
        }
    }
}

/// Also the tasks of an array that wait, `123_[1-5%2]`, which are the array, and a part of a heterogeneous job, `123+1`.
impl FromStr for JobId {
    type Err = std::num::ParseIntError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let text = text.split('+').next().unwrap_or_default();
        match text.split_once('_') {
            Some((job, tasks)) if tasks.starts_with('[') => Ok(Self::from(job.parse::<u64>()?)),
            Some((job, task)) => Ok(Self::task(job.parse()?, task.parse()?)),
            None => Ok(Self::from(text.parse::<u64>()?)),
        }
    }
}

impl Serialize for JobId {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self.task {
            Some(_) => serializer.collect_str(self),
            None => serializer.serialize_u64(self.job),
        }
    }
}

impl<'de> Deserialize<'de> for JobId {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Written {
            Number(u64),
            Text(String),
        }
        match Written::deserialize(deserializer)? {
            Written::Number(job) => Ok(Self::from(job)),
            Written::Text(text) => text.parse().map_err(serde::de::Error::custom),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_job_is_read_as_slurm_writes_it() {
        let read = |text: &str| text.parse::<JobId>().ok();
        assert_eq!(read("123"), Some(JobId::from(123)));
        assert_eq!(read("123_4"), Some(JobId::task(123, 4)));
        for array in ["123_[1-5%2]", "123_[7]", "123_[1,3-9:2]", "123+1"] {
            assert_eq!(read(array), Some(JobId::from(123)), "{array}");
        }
        for none in ["", "x", "123_", "_4", "123_x", "123.batch", "123_4.0", "123.4+"] {
            assert_eq!(read(none), None, "{none}");
        }
    }

    #[test]
    fn records_hold_a_number_where_it_is_one() {
        for (job, text) in [(JobId::from(7), "7"), (JobId::task(7, 2), "\"7_2\"")] {
            assert_eq!(serde_json::to_string(&job).unwrap(), text);
            assert_eq!(serde_json::from_str::<JobId>(text).unwrap(), job);
        }
    }
}
