//! Accuracy of a cache policy on recall tasks, compared with full attention in memory on the same prompts.
//!
//! | File | Command | What it does |
//! |---|---|---|
//! | `prompts` | all | reads prompt files |
//! | `run`, `report` | `kvrun recall` | answers prompts under one policy, and reports accuracy and bytes read |
//! | `compare`, `table`, `plot` | `kvrun compare` | runs many methods on the same stored bytes |
//! | `calibrate` | `kvrun calibrate` | fits adapters |
//! | `drift` | all | tells how far keys are from the calibration's keys |

mod calibrate;
mod compare;
mod drift;
mod plot;
mod prompts;
mod report;
mod run;
mod table;

pub use calibrate::{collect, fit};
pub use compare::{Plan, compare};
pub use drift::Drift;
pub use plot::svg;
pub use prompts::{Prompt, load};
pub use report::{Cell, Report, pipeline_line};
pub use run::{Answers, RecallRun, STATE, answer};
pub use table::{Comparison, Row};
