//! Headers of GGUF files: the input itself, and the input with correct magic and version.
//!
//! The parser reports an error or a header, and never panics. Every tensor of a header is inside of the file.
#![no_main]

use libfuzzer_sys::fuzz_target;
use stratakv_llama::gguf::GgufHeader;
use stratakv_llama::gguf::value::MetaValue;

fn read(bytes: &[u8]) {
    let Ok(header) = GgufHeader::parse(bytes) else { return };
    let mut ranges: Vec<_> = header.tensors().values().map(|tensor| tensor.bytes.clone()).collect();
    ranges.sort_unstable_by_key(|range| (range.start, range.end));
    assert!(ranges.windows(2).all(|pair| pair[0].end <= pair[1].start));
    assert!(ranges.iter().all(|range| range.start >= header.data_start() && range.end <= bytes.len()));
    for value in header.metadata().values() {
        if let MetaValue::List(list) = value {
            assert_eq!(list.values().count() as u64, list.len());
        }
    }
}

fuzz_target!(|data: &[u8]| {
    read(data);
    let mut fixed = data.to_vec();
    if fixed.len() >= 8 {
        fixed[..8].copy_from_slice(b"GGUF\x03\0\0\0");
        read(&fixed);
    }
});
