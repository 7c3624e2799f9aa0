//! Accuracy of a cache policy on recall tasks, compared with full attention in memory on the same prompts.
//!
//! | File | Command | What it does |
//! |---|---|---|
//! | `prompts` | all | reads prompt files |
//! | `modes` | `recall`, `compare` | options that change how prompts are run |
//! | `needles` | `recall`, `compare` | makes prompts from the needles of others |
//! | `profile_source` | `recall`, `compare` | records queries that clusters are made of |
//! | `fill` | all | fills caches with the tokens before a question |
//! | `answer` | all | feeds a question and its answer to a cache |
//! | `run`, `report` | `kvrun recall` | answers prompts under one policy, and reports accuracy and bytes read |
//! | `compare`, `table`, `plot` | `kvrun compare` | runs many methods on the same stored bytes |
//! | `calibrate` | `kvrun calibrate` | fits adapters |
//! | `drift` | all | tells how far keys are from the calibration's keys |

mod answer;
mod calibrate;
mod compare;
mod drift;
mod fill;
mod modes;
mod needles;
mod plot;
mod profile_source;
mod prompts;
mod report;
mod run;
mod table;

pub use answer::{Answers, answer};
pub use calibrate::{collect, fit};
pub use compare::{Plan, compare};
pub use drift::Drift;
pub use fill::{fill, grow, prefill_tokens};
pub use modes::{Loaded, ModeArgs, PromptFilter};
pub use needles::{Half, questions, shift};
pub use plot::svg;
pub use profile_source::ProfileSource;
pub use prompts::{Prompt, load};
pub use report::{Cell, Report, pipeline_line};
pub use run::{RecallRun, STATE};
pub use table::{Comparison, Row};
