//! What the kernel says about the node.

/// Model name of the first CPU in `/proc/cpuinfo`.
pub fn cpu_model(cpuinfo: &str) -> String {
    let models = cpuinfo.lines().filter_map(|line| line.strip_prefix("model name"));
    models
        .filter_map(|rest| rest.split_once(':'))
        .map(|(_, name)| name.trim().to_owned())
        .next()
        .unwrap_or_default()
}

/// Logical CPUs on line.
pub fn cpus(cpuinfo: &str) -> u32 {
    let count = cpuinfo
        .lines()
        .filter(|line| line.starts_with("processor"))
        .count();
    u32::try_from(count).unwrap_or(u32::MAX)
}

/// A field of `/proc/meminfo` in bytes; 0 when it isn't there.
pub fn memory(meminfo: &str, field: &str) -> u64 {
    let value = meminfo
        .lines()
        .find_map(|line| line.strip_prefix(field)?.strip_prefix(':'));
    let kib = value.and_then(|value| value.trim().strip_suffix("kB")?.trim().parse::<u64>().ok());
    kib.unwrap_or(0).saturating_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cpus_are_counted_and_named() {
        let text = "processor\t: 0\nmodel name\t: Some CPU @ 2 GHz\n\nprocessor\t: 1\nmodel name\t: Other\n";
        assert_eq!((cpus(text), cpu_model(text).as_str()), (2, "Some CPU @ 2 GHz"));
        assert_eq!((cpus(""), cpu_model("").as_str()), (0, ""));
    }

    #[test]
    fn memory_is_read_by_its_whole_name() {
        let text = "MemTotal:       16 kB\nMemTotalOther: 5 kB\nMemAvailable:    8 kB\n";
        assert_eq!(memory(text, "MemTotal"), 16 << 10);
        assert_eq!(memory(text, "MemAvailable"), 8 << 10);
        assert_eq!(memory(text, "Mem"), 0);
    }
}
