/* What happens when a mapped file cannot be read any more. */
#ifndef BRAID_BASE_BUSFAULT_H
#define BRAID_BASE_BUSFAULT_H

/* After this call, an access to a part of a mapped file that no longer exists (the file was truncated, or its disk
 * failed) ends the process with exit code 1 and a message that names the file, not with an unexplained signal. Data
 * files are read by copies that fail without a signal (file_map_read); weights are read through their maps, but only
 * before a run has any state. */
void busfault_report(void);

#endif
