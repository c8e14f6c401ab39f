// SPDX-License-Identifier: Apache-2.0

use super::*;

#[test]
fn a_report_is_a_line_of_json() {
    let report = Report::Found {
        disk: "vda",
        serial: "1234",
        size: 5,
        before: &[Some(7), None],
        at: 1_700_000_000,
    };
    assert_eq!(
        "\n{\"event\":\"found\",\"disk\":\"vda\",\"serial\":\"1234\",\"size\":5,\
         \"before\":[7,null],\"at\":1700000000}\n",
        report.line()
    );
}
