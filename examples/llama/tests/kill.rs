//! A generation that is killed with SIGKILL at any moment and run again ends with the text of an uninterrupted run.

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

const MAX_TOKENS: &str = "24";

struct Case {
    model: PathBuf,
    ids: PathBuf,
    options: &'static [&'static str],
}

impl Case {
    fn command(&self, device: &Path) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_kvrun"));
        command.arg("generate").arg("--model").arg(&self.model).arg("--prompt-ids").arg(&self.ids);
        command.args(["--max-tokens", MAX_TOKENS, "--session", "s", "--memory-limit", "16MiB"]).args(self.options);
        command.arg("--device").arg(device).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    /// Runs for at most `time`. Returns whether it was killed, and its output.
    fn run(&self, device: &Path, time: Duration) -> (bool, Output) {
        let mut child = self.command(device).spawn().unwrap();
        let end = Instant::now() + time;
        let mut ended = false;
        while !ended && Instant::now() < end {
            ended = child.try_wait().unwrap().is_some();
            std::thread::sleep(Duration::from_millis(1));
        }
        // This sends SIGKILL.
        child.kill().unwrap();
        let output = child.wait_with_output().unwrap();
        (!output.status.success(), output)
    }
}

fn text(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

fn device(dir: &Path, name: &str) -> PathBuf {
    let device = dir.join(name);
    std::fs::create_dir(&device).unwrap();
    device
}

fn killed_often(kills_wanted: usize, cases: &[&'static [&'static str]]) {
    let fixtures = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures");
    let dir = tempfile::tempdir().unwrap();
    let ids = dir.path().join("ids");
    let prompt: Vec<String> = (0..200).map(|i| (3 + i * 7 % 60).to_string()).collect();
    std::fs::write(&ids, prompt.join(" ")).unwrap();
    let mut random = fastrand::Rng::with_seed(0x2545_f491_4f6c_dd1d);
    let (mut kills, mut resumed) = (0, 0);
    for (nth, options) in cases.iter().enumerate() {
        let case = Case { model: fixtures.join("tiny-arch/llama3"), ids: ids.clone(), options };
        let whole_device = device(dir.path(), &format!("whole-{nth}"));
        let begin = Instant::now();
        let (failed, whole) = case.run(&whole_device, Duration::from_secs(60));
        let note = String::from_utf8_lossy(&whole.stderr);
        assert!(!failed, "{note}");
        assert_eq!(note.contains("clusters stored"), options.contains(&"--store-clusters"), "{note}");
        let (whole, time) = (text(&whole), begin.elapsed());
        let wanted = kills_wanted * (nth + 1) / cases.len();
        let mut round = 0;
        while kills < wanted {
            let device = device(dir.path(), &format!("{nth}-{round}"));
            round += 1;
            let mut interrupted = 0_u32;
            loop {
                // Delays go up to 1.2 times a whole run, so that some runs end by themselves. They grow with each kill,
                // because a run that recovers the store may take longer than one that creates it.
                let delay = time.mul_f64(random.f64() * (1.2 + f64::from(interrupted) / 8.0));
                let (killed, output) = case.run(&device, delay);
                let said = text(&output);
                assert!(whole.starts_with(&said), "said {said:?}, expected the beginning of {whole:?}");
                if !killed {
                    assert_eq!(said, whole);
                    let note = String::from_utf8(output.stderr).unwrap();
                    resumed += usize::from(!note.contains("(0 resumed)"));
                    break;
                }
                let error = String::from_utf8_lossy(&output.stderr);
                assert!(!error.contains("kvrun:") && !error.contains("panicked"), "{error}");
                interrupted += 1;
            }
            kills += interrupted as usize;
            std::fs::remove_dir_all(&device).unwrap();
        }
    }
    println!("{kills} kills, {resumed} answers continued after a kill");
    assert!(resumed > 0);
}

const SAMPLERS: [&[&str]; 2] = [&[], &["--temperature", "1.5", "--top-p", "0.9", "--seed", "11"]];

#[test]
fn a_killed_generation_ends_with_the_same_text() {
    killed_often(24, &SAMPLERS);
}

/// The budget is the whole context, so that pages and groups give the same text.
#[test]
fn a_killed_generation_that_stores_clusters_ends_with_the_same_text() {
    killed_often(12, &[&["--policy", "infllm:8", "--budget", "1/1", "--store-clusters"]]);
}

#[test]
#[ignore = "takes minutes: many more kills of the same kind"]
fn a_generation_killed_hundreds_of_times_ends_with_the_same_text() {
    killed_often(300, &SAMPLERS);
}
