use super::*;
use clap::CommandFactory;

fn error(args: &[&str]) -> String {
    Cli::try_parse_from(std::iter::once("kvrun").chain(args.iter().copied())).unwrap_err().to_string()
}

#[test]
fn defaults_are_the_documented_ones() {
    Cli::command().debug_assert();
    let cli = Cli::try_parse_from(["kvrun", "recall"]).unwrap();
    let Command::Recall(args) = cli.command else { panic!("not recall") };
    let options = args.backend_options().unwrap();
    assert_eq!((options.policy.to_string().as_str(), options.budget_name().as_str()), ("minmax:raw", "1/13"));
    assert_eq!((options.group_tokens, args.contexts.as_slice()), (4, [1024, 2048, 4096].as_slice()));
    assert!(args.prompt_file().is_file(), "{}", args.prompt_file().display());
    let budget = |line: &str| {
        let Command::Generate(args) = Cli::try_parse_from(line.split(' ')).unwrap().command else { panic!() };
        args.backend_options(192).unwrap().budget_name()
    };
    assert_eq!(budget("kvrun generate --model m --prompt x --max-tokens 9"), "1/13:512t");
    assert_eq!(budget("kvrun generate --model m --prompt x --max-tokens 9 --budget 1/34"), "1/34");
    let cache = |options: &str| {
        let line = format!("kvrun generate --model m --prompt x --max-tokens 9{options}");
        let Command::Generate(args) = Cli::try_parse_from(line.split(' ')).unwrap().command else { panic!() };
        args.backend_options(192).unwrap().cache_mib
    };
    for (options, mib) in [("", 128), (" --memory-limit 64MiB", 16), (" --memory-limit 7MiB", 0), (" --cache-mib 3", 3)]
    {
        assert_eq!(cache(options), mib, "{options:?}");
    }
    assert_eq!(options.cache_mib, 0, "recall counts reads");
    let groups = |options: &str, key_dimensions| {
        let line = format!("kvrun generate --model m --prompt x --max-tokens 9{options}");
        let Command::Generate(args) = Cli::try_parse_from(line.split(' ')).unwrap().command else { panic!() };
        args.backend_options(key_dimensions).unwrap().group_tokens
    };
    for (options, key_dimensions, tokens) in [
        ("", 1024, 4),
        ("", 512, 4),
        ("", 192, 8),
        ("", 64, 16),
        ("", 16, 32),
        (" --dtype f32", 192, 4),
        (" --codec int8", 1024, 4),
        (" --codec int4", 512, 8),
        (" --group-tokens 2", 192, 2),
    ] {
        assert_eq!(groups(options, key_dimensions), tokens, "{options:?}, {key_dimensions}");
    }
}

/// Parses a command line whose quoted arguments may hold blanks.
fn parses(line: &str) {
    let parts = line.split('\'').enumerate();
    let words = parts.flat_map(|(i, part)| match i % 2 {
        0 => part.split_whitespace().map(str::to_owned).collect(),
        _ => vec![part.to_owned()],
    });
    if let Err(error) = Cli::try_parse_from(words) {
        panic!("{line}: {error}");
    }
}

#[test]
fn examples_of_every_help_parse() {
    let texts = [
        EXAMPLES,
        recall::RECALL_EXAMPLES,
        calibrate::CALIBRATE_EXAMPLES,
        compare::COMPARE_EXAMPLES,
        clusters::PROFILE_EXAMPLES,
        clusters::CLUSTER_EXAMPLES,
        generate::GENERATE_EXAMPLES,
        chat::CHAT_EXAMPLES,
        convert::CONVERT_EXAMPLES,
    ];
    let lines = texts.iter().flat_map(|text| text.lines()).filter_map(|line| line.strip_prefix("  "));
    let commands: Vec<&str> = lines.filter(|line| !line.starts_with('#')).collect();
    assert_eq!(commands.len(), 33);
    commands.into_iter().for_each(parses);
    for command in Cli::command().get_subcommands() {
        let help = command.get_after_help().map(ToString::to_string).unwrap_or_default();
        assert!(help.contains(&format!("kvrun {}", command.get_name())), "{}", command.get_name());
    }
}

#[test]
fn commands_of_the_documents_parse() {
    let readme = [include_str!("../../README.md"), include_str!("../../CLUSTERS.md")].concat().replace("\\\n", " ");
    let commands = readme.lines().filter(|line| line.starts_with("kvrun "));
    let commands: Vec<&str> = commands.map(|line| line.split('#').next().unwrap_or_default()).collect();
    assert_eq!(commands.len(), 30);
    commands.into_iter().for_each(parses);
}

#[test]
fn nonsense_is_refused_with_its_reason() {
    assert!(error(&["recall", "--budget", "0"]).contains("attends to no token"));
    assert!(error(&["recall", "--budget", "0t"]).contains("attends to no token"));
    assert!(error(&["recall", "--dtype", "int3"]).contains("bf16"));
    assert!(error(&["recall", "--prefill", "0"]).contains("1.."));
    for share in ["0", "2", "a", "1/0", "nan"] {
        assert!(error(&["profile", "--out", "x", "--share", share]).contains("share"), "{share}");
    }
    for queries in ["last:0", "last:", "last:x", "all"] {
        assert!(error(&["profile", "--out", "x", "--queries", queries]).contains("give last:N"), "{queries}");
    }
    assert!(error(&["profile"]).contains("--out"));
    for profile in ["last:0", "last:", "decode", "decode:x", "questions:0", "all"] {
        for command in ["recall", "compare"] {
            assert!(error(&[command, "--profile", profile]).contains("questions:N with N from 1 on"), "{profile}");
        }
    }
    let cluster = ["cluster", "--model", "x", "--session", "s", "--device", "d"];
    for method in ["tck:64", "pqcache", "tokens", "full", "window", "swarm:0", "best", ""] {
        assert!(error(&[&cluster[..], &["--methods", method]].concat()).contains("methods"), "{method}");
    }
    assert!(error(&cluster[..5]).contains("--device"));
    assert!(error(&["recall", "--keep"]).contains("--device"));
    assert!(error(&["recall", "--memory-limit", "5 parsecs"]).contains("parsecs"));
    assert!(error(&["generate", "--model", "x", "--prompt", "a", "--max-tokens", "0"]).contains("0"));
    assert!(
        error(&["generate", "--model", "x", "--prompt", "a", "--prompt-ids", "b", "--max-tokens", "1"])
            .contains("cannot be used with")
    );
    assert!(error(&["generate", "--model", "x", "--max-tokens", "1", "--session", "s"]).contains("--device"));
}
