//! Reading robot episodes: LeRobot metadata, parquet columns, video windows, geometry tokens -> clips.
