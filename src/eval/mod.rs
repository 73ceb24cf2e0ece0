//! Metrics of predicted video and pose, and the verdict over an experiment.
